"""A row to evaluate and the run that it needs, with their identities: computed once, here, before anything is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from landmark.config import Config
from landmark.config.rows import Row
from landmark.config.saved import from_saved
from landmark.experiment import identity
from landmark.experiment.inputs import Inputs
from landmark.experiment.named_runs import find_run, has_weights
from landmark.utils.errors import UserError
from landmark.utils.files import read_json
from landmark.utils.nested import difference

RUN = "run.json"  # in a run's folder: the settings that are its identity


@dataclass(frozen=True)
class Run:
    """One training.

    settings: all that decides its weights. id: their digest. folder: where its weights are, or will be. start: the run
    whose weights it starts from, or, with `model.as_is`, whose weights it is. is_given: it is never trained here,
    because `run` or `model.as_is` names its folder.
    """

    config: Config
    settings: dict[str, Any]
    id: str
    folder: Path
    start: "Run | None" = None
    is_given: bool = False

    @property
    def training(self) -> "Run | None":
        """The run itself, or the one whose weights it reads; None where nothing is trained here."""
        return self.start if self.is_given else self

    @property
    def is_trained(self) -> bool:
        return has_weights(self.folder)

    @property
    def start_from(self) -> str | None:
        """Folder, or name on the hub, of the weights that the training starts from; None: they are drawn anew."""
        return self.config.model.name if self.start is None else str(self.start.folder)


@dataclass(frozen=True)
class Job:
    """One row of one seed. name: the row's. overrides: those that give it. settings: all that decides its numbers."""

    name: str
    config: Config
    overrides: list[str]
    run: Run
    settings: dict[str, Any]
    id: str

    @property
    def is_known(self) -> bool:
        """Whether its identity is known (see `planned_jobs`)."""
        return not self.id.startswith("?")


def read_run(folder: Path) -> dict[str, Any]:
    """The settings that are the identity of the run in a folder. Raises UserError where the file is damaged."""
    keys = {"model": dict, "tokenizer": str}
    return read_json(folder / RUN, keys, "name another run=, or train this one, which writes it anew")


def jobs_of(row: Row, inputs: Inputs) -> list[Job]:
    """The jobs of a row, one per seed. Raises UserError where a corpus, a tokenizer or a folder cannot be used."""
    return [_job(row, config, inputs) for config in row.configs]


def planned_jobs(row: Row, inputs: Inputs) -> list[Job]:
    """The same without preparing a corpus: where its hash is unknown, identities start with ?."""
    return [
        _job(row, one, inputs)
        if inputs.prepared_corpus(one) is not None
        else Job(row.name, one, row.overrides, _unknown_run(one), {}, f"?{row.name}")
        for one in row.configs
    ]


def folder_of(config: Config, inputs: Inputs) -> Path:
    """Folder of the run that a configuration trains, or that `run` or `model.as_is` names, which needs no corpus."""
    if config.run is not None:
        return find_run(config.run, config.output)
    is_named = config.model.as_is and config.start_run is None
    return _folder_of_named(config) if is_named else run_of(config, inputs).folder


def run_of(config: Config, inputs: Inputs) -> Run:
    """The run that a configuration trains, or that its `run` names.

    Raises UserError where `run` names a folder that was trained with another configuration.
    """
    if config.run is not None:
        return _given_run(config, find_run(config.run, config.output), inputs)
    start = None
    if config.start_run is not None:
        start = run_of(from_saved(config.start_run), inputs)
    weights = start.id if start else inputs.weights_sha256(config.model.name) if config.model.name else None
    stream, tokenizer = inputs.corpus(config).split("train").sha256, inputs.tokenizer(config)
    settings = identity.run_settings(config, tokenizer.hash, stream, weights, tokenizer.beginning)
    if config.model.as_is:
        folder = _folder_of_named(config) if start is None else start.folder
        return Run(config, settings, identity.digest(settings), folder, start, is_given=True)
    name = identity.run_name(config, run := identity.digest(settings))
    return Run(config, settings, run, Path(config.output) / "runs" / name, start)


def _folder_of_named(config: Config) -> Path:
    """The folder of the model of transformers that a configuration names, which may be on the hub."""
    name = str(config.model.name)
    if (name.startswith(("/", ".", "~")) or name.endswith(".gguf")) and not Path(name).exists():
        raise UserError(f"model.name={name}: there is no such folder or file")
    from landmark.models import pretrained  # takes seconds

    return pretrained.folder_of(name)


def _given_run(config: Config, folder: Path, inputs: Inputs) -> Run:
    stored = read_run(folder)
    expected = identity.run_settings(config, inputs.tokenizer(config).hash, str(stored.get("stream")))
    here, there = ({key: each.get(key) for key in ("model", "tokenizer", "cmt")} for each in (expected, stored))
    if changed := difference(here, there):
        raise UserError(f"run={config.run} was trained with another configuration: {changed}")
    return Run(config, stored, identity.digest(stored), folder, is_given=True)


def _job(row: Row, config: Config, inputs: Inputs) -> Job:
    run = run_of(config, inputs)
    settings = identity.row_settings(config, run.id, inputs.corpus(config).split(config.eval.split).sha256)
    return Job(row.name, config, row.overrides, run, settings, identity.digest(settings))


def _unknown_run(config: Config) -> Run:
    """Rows that need the same run have the same one here too."""
    start = _unknown_run(from_saved(config.start_run)) if config.start_run is not None else None
    run = "?" + identity.digest(identity.run_settings(config, "", "", start and start.id))[:4]
    folder = Path(config.output) / "runs" / identity.run_name(config, run)
    return Run(config, {}, run, folder, start, is_given=config.run is not None or bool(config.model.as_is))
