"""A run is named, not retyped: `run=latest`, its name or its folder; its folder knows tokenizer, data and sizes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from landmark.config import Config
from landmark.config.composer import parse
from landmark.config.saved import trained_with
from landmark.config.schema import GridConfig
from landmark.utils.errors import UserError
from landmark.utils.files import read_json

_TAKEN = ("size", "model", "data", "tokenizer", "train", "cmt", "positions")  # groups that decide a training
# Settings of those groups that say how a trained model is read, which the row that trained the run does not decide.
_OF_READING = {"model": {"backend"}, "cmt": {"cutoff"}, "positions": {"mapping"}}
_TAKEN_KEYS = ("eval.split", "eval.tokens")  # that the size decides


def has_weights(folder: Path) -> bool:
    """Whether a run's folder holds a trained model."""
    return (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))


def find_run(name: str, output: str | Path, kind: str | None = None) -> Path:
    """The folder of a run.

    Args:
        name: a folder, `latest` for the run that was trained last, or the name of a run below `output`, or the end of
            it.
        output: folder that has the runs.
        kind: of `latest`: the last of our models of this kind alone, as "landmark".

    Raises UserError where there is no such run.
    """
    runs = sorted((Path(output) / "runs").glob("*"), key=lambda folder: folder.name)
    if name == "latest":
        trained = [folder for folder in runs if has_weights(folder) and (kind is None or _kind(folder) == kind)]
        if not trained:
            said = " ".join(filter(None, ("no trained", kind, "run")))
            raise UserError(f"run=latest: {Path(output) / 'runs'} has {said}, train one or name output=")
        return max(trained, key=lambda folder: (folder / "config.json").stat().st_mtime_ns)
    if Path(name).is_dir():
        return Path(name)
    named = [folder for folder in runs if folder.name == name] or [each for each in runs if each.name.endswith(name)]
    if len(named) == 1:
        return named[0]
    fault = "is the end of several runs" if named else "no such run"
    known = ", ".join(folder.name for folder in named or runs) or "no run"
    raise UserError(f"run={name}: {fault}, {output}/runs has {known}")


def with_settings_of_run(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with the tokenizer, data, model and sizes of the run that `run` names.

    overrides: of the command line; what they set is kept. A task that reads one text needs no row of an experiment.
    """
    if config.run is None or config.task == "train":
        return config
    config = replace(config, run=str(find_run(config.run, config.output)))
    if config.task in ("generate", "inspect") and config.row is None:
        config = replace(config, rows={}, parts={}, grid=GridConfig(), compare={}, figure="rows")
    stored = trained_with(Path(config.run or ""))
    if stored is None or config.rows or config.grid.axes:
        return config
    keys = {override.key_or_group for override in parse(overrides)}
    taken = {name: _merged(name, config, stored, keys) for name in _TAKEN if name not in keys}
    reading = {key.partition(".")[2] for key in _TAKEN_KEYS if key not in keys and "size" not in keys}
    own = {name: getattr(stored.eval, name) for name in reading}
    return replace(config, **taken, eval=replace(config.eval, **own))


def _kind(folder: Path) -> str | None:
    return read_json(folder / "config.json").get("kind")


def _merged(name: str, config: Config, stored: Config, keys: set[str]) -> object:
    """The run's group of settings, with those keys of it that the command line sets or that say how it is read."""
    given, group = getattr(config, name), getattr(stored, name)
    own = {key.partition(".")[2] for key in keys if key.startswith(f"{name}.")} | _OF_READING.get(name, set())
    return replace(group, **{key: getattr(given, key) for key in own}) if own else group
