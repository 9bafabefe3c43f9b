"""What a command makes and reads: rows to evaluate, and the runs that they need, with their identities, computed here.
A run may also be named (`run=latest`, its name or its folder): it knows its tokenizer, data and sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.experiment.config import Config, checks
from landmark.experiment.config.rows import Row, parse
from landmark.experiment.config.saved import RUN, from_saved, trained_with
from landmark.experiment.config.schema import SYNTHETIC, UNIQUE_BLOCKS, memory_settings
from landmark.experiment.evaluation.chunks import chunk_length, kept_tokens, penultimate_chunk_start
from landmark.experiment.runs import identity
from landmark.models.config import decoder_config
from landmark.utils.collection import without_collection
from landmark.utils.errors import UserError
from landmark.utils.files import HASHES, check_named, read_json, sha256_file
from landmark.utils.setting import difference

if TYPE_CHECKING:
    from landmark.experiment.data import Corpus, SyntheticCorpus, Tokenizer

_TAKEN = ("size", "model", "data", "tokenizer", "train", "cmt", "positions")  # groups that decide a training
# Settings of those groups that say how a trained model is read, or where a corpus is prepared, which its run does not
# decide.
_OF_READING = {"model": {"backend"}, "data": {"cache"}, "cmt": {"cutoff"}, "positions": {"mapping"}}
_TAKEN_KEYS = ("eval.split", "eval.tokens")  # that the size decides


def check(config: Config) -> None:
    """Raise UserError, naming the key, where a setting of a row makes no sense: any of them. Loads no torch."""
    shape = decoder_config(config.model, cmt=config.cmt.enabled)
    checks.check(config)
    resolved = checks.resolve(config)
    settings = resolved.eval
    local = chunk_length(shape, settings.length, settings.local, kept_tokens(config))
    if config.model.kind == "landmark":
        memory_settings(config)
    if settings.task == UNIQUE_BLOCKS:
        penultimate_chunk_start(shape, resolved, settings.length, local)


class Inputs:
    """Opens the tokenizer and the corpus that a configuration names, and keeps them open for the next one."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[Any, ...], Tokenizer] = {}
        self._corpora: dict[str, Corpus | SyntheticCorpus] = {}
        self._weights: dict[str, str] = {}

    def tokenizer(self, config: Config) -> "Tokenizer":
        """Raises UserError where the ranks file is missing or has the wrong hash."""
        key = name, file, vocab_size = config.tokenizer.name, config.tokenizer.file, config.tokenizer.vocab_size
        if key not in self._tokenizers:
            from landmark.experiment.data import load_tokenizer

            self._tokenizers[key] = load_tokenizer(name, file, vocab_size)
        return self._tokenizers[key]

    def corpus(self, config: Config) -> "Corpus | SyntheticCorpus":
        """The corpus, prepared first where it is not. Raises UserError where it is missing, empty or damaged."""
        if (corpus := self.prepared_corpus(config)) is None:
            from landmark.experiment.data import prepare

            corpus = prepare(**self._source(config))
            self._corpora[str((config.data, config.tokenizer))] = corpus
        return corpus

    def prepared_corpus(self, config: Config) -> "Corpus | SyntheticCorpus | None":
        """The corpus where it is prepared, else None. Raises UserError where it is damaged."""
        key = str((config.data, config.tokenizer))
        if config.data.name in SYNTHETIC:  # prompts leave room for their answers
            key += f", {config.eval.generated}"
        if key not in self._corpora:
            from landmark.experiment.data import find

            corpus = self._pass_keys(config) if config.data.name in SYNTHETIC else find(**self._source(config))
            if corpus is None:
                return None
            self._corpora[key] = corpus
        return self._corpora[key]

    def has_same_texts(self, config: Config) -> bool:
        """Whether the files of a prepared corpus were read again, and have the texts of which it was made. Raises
        UserError where they have others.
        """
        from landmark.experiment.data.preparation import check_texts

        return config.data.name not in SYNTHETIC and check_texts(**self._source(config))

    def evaluated(self, config: Config) -> "Corpus | SyntheticCorpus":
        """The corpus of an evaluation; or the prompts of `eval.task`, of which RULER makes those of text."""
        corpus, settings = self.corpus(config), config.eval
        if settings.question is None:
            return corpus
        if settings.task == "passkey":
            return self._pass_keys(config)
        from landmark.experiment.data import Corpus, SyntheticCorpus
        from landmark.experiment.data.ruler import Ruler
        from landmark.experiment.data.ruler.material import Essays

        assert isinstance(corpus, Corpus)
        assert settings.generated is not None
        tokenizer = self.tokenizer(config)
        essays = Essays(corpus.split(settings.split).tokens, tokenizer)
        return SyntheticCorpus(Ruler(settings.question, settings.generated, essays), tokenizer)

    def _pass_keys(self, config: Config) -> "SyntheticCorpus":
        from landmark.experiment.data import SyntheticCorpus
        from landmark.experiment.data.passkey import Passkey

        return SyntheticCorpus(
            Passkey(config.data.needles, generated=config.eval.generated or 0), self.tokenizer(config)
        )

    def weights_sha256(self, name: str) -> str:
        """SHA-256 of the weights of a model of transformers, by its folder or its name on the hub."""
        if name not in self._weights:
            from landmark.models.pretrained import weights_sha256

            self._weights[name] = weights_sha256(name)
        return self._weights[name]

    def _source(self, config: Config) -> dict[str, Any]:
        data = {name: getattr(config.data, name) for name in ("name", "cache", "path", "max_documents")}
        options = {"configs": config.data.configs} if config.data.name == "arxiv_math" else {}
        return {**data, "tokenizer": self.tokenizer(config), "options": options}


@dataclass(frozen=True)
class Run:
    """One training. settings: all that decides its weights. id: their digest. folder: of its weights. start: the run
    whose weights it begins with, or, with `model.as_is`, has. is_given: `run` or `model.as_is` names it; it is never
    trained.
    """

    config: Config
    settings: dict[str, Any]
    id: str
    folder: Path
    start: "Run | None" = None
    is_given: bool = False

    @property
    def trainings(self) -> "list[Run]":
        """What is trained here for it: the run itself, unless it is given, and those from which they start."""
        return [*([] if self.is_given else [self]), *(self.start.trainings if self.start else [])]

    @property
    def is_trained(self) -> bool:
        return has_weights(self.folder)

    @property
    def weights(self) -> str | None:
        """SHA-256 of the hashes of its weights and configuration; None of a folder that this program did not write."""
        hashes = self.folder / HASHES
        return sha256_file(hashes) if hashes.is_file() else None

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
        """Whether its identity is known (see `job_of`)."""
        return not self.id.startswith("?")


def read_run(folder: Path) -> dict[str, Any]:
    """The settings that are the identity of the run in a folder. Raises UserError where the file is damaged."""
    keys = {"model": dict, "tokenizer": str}
    return read_json(folder / RUN, keys, "name another run=, or train this one, which writes it anew")


def job_of(row: Row, config: Config, inputs: Inputs, *, prepare: bool = True) -> Job:
    """The job of a row and one of its configurations. prepare: its corpus, where it is not; else unknown identities
    start with ?. Raises UserError where something that it reads cannot be used.
    """
    if not prepare and inputs.prepared_corpus(config) is None:
        return Job(row.name, config, row.overrides, _unknown_run(config), {}, f"?{row.name}")
    run = run_of(config, inputs)
    settings = identity.row_settings(config, run.id, inputs.corpus(config).split(config.eval.split).sha256)
    return Job(row.name, config, row.overrides, run, settings, identity.digest(settings))


def folder_of(config: Config, inputs: Inputs) -> Path:
    """Folder of the run that a configuration trains, or that `run` or `model.as_is` names, which needs no corpus."""
    if config.run is not None:
        return find_run(config.run, config.output)
    is_named = config.model.as_is and config.start_run is None
    return _folder_of_named(config) if is_named else run_of(config, inputs).folder


def run_of(config: Config, inputs: Inputs) -> Run:
    """The run that a configuration trains, or that its `run` names. Raises UserError where that is another."""
    if config.run is not None:
        return _given_run(config, find_run(config.run, config.output), inputs)
    if config.model.name and config.model.kind == "landmark":
        from landmark.models import pretrained

        pretrained.check_landmarks(config.model.name)  # before another row trains for an hour
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


@without_collection()
def _folder_of_named(config: Config) -> Path:
    """The folder of the model of transformers that a configuration names, which may be on the hub."""
    name = str(config.model.name)
    check_named(name)
    from landmark.models import pretrained  # takes seconds

    return pretrained.folder_of(name)


def _given_run(config: Config, folder: Path, inputs: Inputs) -> Run:
    stored = read_run(folder)
    expected = identity.run_settings(config, inputs.tokenizer(config).hash, str(stored.get("stream")))
    compared = [key for key in ("model", "tokenizer", "cmt", "module") if key != "module" or key in stored]
    here, there = ({key: each.get(key) for key in compared} for each in (expected, stored))
    if changed := difference(here, there):
        raise UserError(f"run={config.run} was trained with another configuration: {changed}")
    return Run(config, stored, identity.digest(stored), folder, is_given=True)


def _unknown_run(config: Config) -> Run:
    """Rows that need the same run have the same one here too."""
    start = _unknown_run(from_saved(config.start_run)) if config.start_run is not None else None
    run = "?" + identity.digest(identity.run_settings(config, "", "", start and start.id))[:4]
    folder = Path(config.output) / "runs" / identity.run_name(config, run)
    return Run(config, {}, run, folder, start, is_given=config.run is not None or bool(config.model.as_is))


def has_weights(folder: Path) -> bool:
    """Whether a run's folder holds a trained model, or it is a model's file itself."""
    return folder.is_file() or ((folder / "config.json").is_file() and any(folder.glob("model*.safetensors")))


def find_run(name: str, output: str | Path, kind: str | None = None) -> Path:
    """The folder of a run. Raises UserError where there is no such run.

    name: a folder, `latest` for the run that was trained last, or the name of a run below `output`, or the end of it.
    kind: of `latest`: the last of our models of this kind alone, as "landmark".
    """
    runs = sorted((Path(output) / "runs").glob("*"), key=lambda folder: folder.name)
    if not name:
        raise UserError("run=: names no run, write latest, a name or a folder")
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
    """The configuration with the tokenizer, data, model and sizes of the run that `run` names, but what `overrides`
    set. A task that reads one text needs no row of an experiment.
    """
    if config.run is None or config.task == "train":
        return config
    kind = "landmark" if config.task == "inspect" else None  # which latest is then
    config = replace(config, run=str(find_run(config.run, config.output, kind)))
    if config.task in ("generate", "inspect") and config.row is None:
        config = replace(config, rows={}, parts={}, compare={}, figure="rows")
    stored = trained_with(Path(config.run or ""))
    if stored is None or config.rows:
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
