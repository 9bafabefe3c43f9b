"""Doing what is missing: prepare a corpus, train a run, evaluate a row. A record is not made twice."""

import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from landmark.config.checks import beyond_training, resolve
from landmark.config.schema import Config, DataConfig, from_dict, to_dict
from landmark.experiment import identity
from landmark.experiment.plan import flops_per_token
from landmark.experiment.processes import errors_left_in, train_together
from landmark.experiment.records import Records
from landmark.tracking.wandb_runs import log_row, sweeping, training_loggers
from landmark.utils.differences import difference
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.progress import ProgressBar

if TYPE_CHECKING:
    from landmark.data import Corpus, SyntheticCorpus, Tokenizer
    from landmark.data.stream import Stream
    from landmark.models import Decoder

RUN = "run.json"  # in a run's folder: the settings that are its identity
CONFIG = "launch.json"  # in a run's folder: the whole configuration, for processes that train it together
SUMMARY = "summary.json"

_log = logging.getLogger(__name__)


class Workshop:
    """Everything below one output folder. Each tokenizer and corpus is opened once."""

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)
        self.records = Records(output)
        self._named: dict[str, str] = {}
        self._torn: set[tuple[str, int, int]] = set()
        self._tokenizers: dict[tuple[Any, ...], Tokenizer] = {}
        self._corpora: dict[tuple[Any, ...], Corpus | SyntheticCorpus] = {}

    def tokenizer(self, config: Config) -> "Tokenizer":
        """Raises UserError: ranks file missing or with the wrong hash."""
        key = (config.tokenizer.name, config.tokenizer.file, config.tokenizer.vocab_size)
        if key not in self._tokenizers:
            from landmark.data import load_tokenizer

            self._tokenizers[key] = load_tokenizer(*key)
        return self._tokenizers[key]

    def _labels(self, config: Config) -> dict[str, Any]:
        return {"size": config.size, "data": config.data.name, "tokenizer": self.tokenizer(config).name}

    def corpus(self, config: Config) -> "Corpus | SyntheticCorpus":
        """The corpus, prepared if it is not. Raises UserError: missing, empty or damaged corpus."""
        if (corpus := self.prepared(config)) is None:
            from landmark.data import prepare

            data = config.data
            corpus = prepare(
                data.name,
                self.tokenizer(config),
                data.cache,
                path=data.path,
                options=_corpus_options(data),
                workers=data.workers,
                max_documents=data.max_documents,
            )
            self._corpora[_corpus_key(config)] = corpus
        return corpus

    def prepared(self, config: Config) -> "Corpus | SyntheticCorpus | None":
        """The corpus if it is prepared, else None. Raises UserError as `corpus`."""
        key = _corpus_key(config)
        if key not in self._corpora:
            from landmark.data import find, synthetic_corpus

            data = config.data
            if (made := synthetic_corpus(data, self.tokenizer(config))) is not None:
                self._corpora[key] = made
                return made
            corpus = find(
                data.name,
                self.tokenizer(config),
                data.cache,
                path=data.path,
                options=_corpus_options(data),
                max_documents=data.max_documents,
            )
            if corpus is None:
                return None
            self._corpora[key] = corpus
        return self._corpora[key]

    def check_lengths(self, config: Config) -> None:
        """Raise UserError where the evaluation does not fit its split, before anything is trained."""
        from landmark.data import SyntheticCorpus, segments

        corpus = self.corpus(config)
        if isinstance(corpus, SyntheticCorpus):
            corpus.prompts(config.eval.split, config.eval.length, 1)
            return
        if config.eval.retriever is not None:
            self._check_sentences(config)
        stream = corpus.split(config.eval.split)
        segments(len(stream), config.eval.length, config.eval.tokens, config.eval.span)

    def check_devices(self, config: Config) -> None:
        """Raise UserError where the run is yet to be trained, by more processes than can share its batch evenly."""
        processes, batch = device_count(config), config.train.batch_size
        if batch % processes and not self.is_trained(config):
            raise UserError(
                f"train.batch_size={batch} cannot be shared evenly by {processes} devices: "
                f"set trainer.devices to a number that divides it"
            )

    def _check_sentences(self, config: Config) -> None:
        """Raise UserError where there are too few sentences to look for; once for rows that look for the same."""
        from landmark.evaluation.half_sentences import document_texts, remove_second_halves

        tokenizer, corpus = self.tokenizer(config), self.corpus(config)
        for split in dict.fromkeys(("validation", config.eval.split)):
            stream = cast("Stream", corpus.split(split))
            key = stream.sha256, config.eval.prompts, config.seed
            if key not in self._torn:
                remove_second_halves(document_texts(stream, tokenizer), config.eval.prompts, config.seed)
                self._torn.add(key)

    def run_settings(self, config: Config) -> dict[str, Any]:
        """The identity of the run that a configuration trains, or of the folder that `run` names."""
        tokenizer = self.tokenizer(config)
        if config.run is None:
            stream = self.corpus(config).split("train").sha256
            return identity.run_settings(config, tokenizer.hash, stream, self.start(config))
        stored = read_json(Path(config.run) / RUN)
        expected = identity.run_settings(config, tokenizer.hash, stored["stream"])
        here, there = ({key: each.get(key) for key in ("model", "tokenizer", "cmt")} for each in (expected, stored))
        if changed := difference(here, there):
            raise UserError(f"run={config.run} was trained with another configuration: {changed}")
        return stored

    def start(self, config: Config) -> str | None:
        """Identity of the weights that a run starts from; None where they are drawn anew."""
        if config.start_run is not None:
            return identity.digest(self.run_settings(from_dict(Config, config.start_run)))
        return None if config.model.name is None else self._weights(config.model.name)

    def _weights(self, name: str) -> str:
        from landmark.models.pretrained import weights_sha256

        if name not in self._named:
            self._named[name] = weights_sha256(name)
        return self._named[name]

    def ensure_start(self, config: Config, group: str) -> str | None:
        """Folder or name of the weights that a run starts from, trained if they are not there."""
        if config.start_run is not None:
            return str(self.ensure_run(from_dict(Config, config.start_run), group)[0])
        return config.model.name

    def run_folder(self, config: Config) -> Path:
        if config.run is not None:
            return Path(config.run)
        if config.model.as_is and config.model.name is not None:
            from landmark.models.pretrained import folder_of

            return folder_of(config.model.name)
        run = identity.digest(self.run_settings(config))
        return self.output / "runs" / identity.run_name(config, run)

    def row_settings(self, config: Config) -> dict[str, Any]:
        """The identity of the row that a configuration evaluates."""
        run = identity.digest(self.run_settings(config))
        settings = identity.row_settings(config, run, self.corpus(config).split(config.eval.split).sha256)
        if config.cmt.per_layer:
            settings["validation"] = self.corpus(config).split("validation").sha256
        return settings

    def ensure_run(self, config: Config, group: str, overrides: Sequence[str] = ()) -> tuple[Path, bool]:
        """Train the run unless it is there. Returns its folder and whether it was trained now.

        overrides: of the row that needs it, for who looks on.
        """
        folder = self.run_folder(config)
        if config.run is not None or config.model.as_is:
            return folder, False
        self.ensure_start(config, group)
        settings = self.run_settings(config)
        run = identity.digest(settings)
        with self.records.lock("runs", run):
            done = self.records.find("runs", run) is not None
            if done and _trained(folder):
                return folder, False
            if done:
                _log.warning("%s has a record but no weights: training it again", folder)
            labels = self._labels(config) | {"seed": config.seed, "experiment": group}
            shown = {"overrides": list(overrides), "run": str(folder)}
            with self.records.attempt("runs", run, settings, labels | shown):
                write_json(folder / RUN, settings)
                results = train_run(config, folder, group, run)
                model = config.model
                if model.name is model.family is model.architecture is None:  # else its shape is not the paper's
                    results["flops_per_token"] = flops_per_token(config, self.tokenizer(config).vocab_size)
                from landmark.training import discard_checkpoints  # loads torch, which names the GPUs to the record

                self.records.write("runs", run, settings, labels, results)
            discard_checkpoints(folder)
        return folder, True

    def is_trained(self, config: Config) -> bool:
        """Whether an evaluation finds the weights it needs."""
        if config.run is not None or config.model.as_is:
            return True
        return self.find_run(config) is not None and _trained(self.run_folder(config))

    def find_run(self, config: Config) -> dict[str, Any] | None:
        return self.records.find("runs", identity.digest(self.run_settings(config)))

    def find_row(self, config: Config) -> dict[str, Any] | None:
        """The row's record; None where it, or the prepared corpus that is part of its identity, is missing."""
        if self.prepared(config) is None:
            return None
        return self.records.find("rows", identity.digest(self.row_settings(config)))

    def ensure_row(self, config: Config, *, name: str, group: str, overrides: list[str]) -> tuple[dict[str, Any], bool]:
        """Evaluate the row unless its record is there. Returns the record and whether it was made now."""
        config = resolve(config)
        record, new = self._find_or_evaluate(config, name, group, overrides)
        if new or sweeping():  # an agent wants the row's number, whoever made it
            log_row(config, record, group=group)
        return record, new

    def _find_or_evaluate(
        self, config: Config, name: str, group: str, overrides: list[str]
    ) -> tuple[dict[str, Any], bool]:
        settings = self.row_settings(config)
        row = identity.digest(settings)
        if (record := self.records.find("rows", row)) is not None:
            return record, False
        folder, _ = self.ensure_run(config, group, overrides)
        with self.records.lock("rows", row):
            if (record := self.records.find("rows", row)) is not None:
                return record, False
            if (warning := beyond_training(config)) is not None:
                _log.warning("%s: %s", name, warning)
            labels = self._labels(config) | {
                "seed": config.seed,
                "block_size": config.model.block_size,
                "row": name,
                "experiment": group,
                "overrides": overrides,
                "run": str(folder),
            }
            with self.records.attempt("rows", row, settings, labels):
                results = self._evaluate(config, folder, name)
                return self.records.write("rows", row, settings, labels, results), True

    def trained_model(self, config: Config) -> "tuple[Decoder, Tokenizer]":
        """The model of the run that a configuration trains, or of the folder that `run` names, and its tokenizer.

        Raises UserError where it is not trained yet, or with another tokenizer.
        """
        from landmark.models import Decoder, load

        folder, tokenizer = self.run_folder(config), self.tokenizer(config)
        if not _trained(folder):
            raise UserError(f"{folder} has no trained model: train it with task=train, or name another with run=FOLDER")
        if (stored := read_json(folder / RUN)["tokenizer"]) != tokenizer.hash:
            raise UserError(
                f"{folder} was trained with another tokenizer ({stored[:10]}…) than tokenizer={tokenizer.name}: "
                "set tokenizer= to the one it was trained with"
            )
        set_threads(config)
        model = load(folder, device=device(config))
        if not isinstance(model, Decoder):
            raise UserError(f"{folder} holds a model of transformers: open it with landmark.huggingface.load")
        return model, tokenizer

    def _evaluate(self, config: Config, folder: Path, name: str) -> dict[str, Any]:
        from landmark.data import SyntheticCorpus
        from landmark.evaluation import evaluate, evaluate_recall
        from landmark.models import decoder_config, load

        tokenizer = self.tokenizer(config)
        set_threads(config)
        model = load(folder, decoder_config(config.model, tokenizer, config.cmt.enabled), device(config))
        corpus = self.corpus(config)
        if config.cmt.per_layer:
            config = self._with_cutoffs(cast("Decoder", model), config, folder, name)
        with ProgressBar(name) as progress:
            if isinstance(corpus, SyntheticCorpus):
                return evaluate_recall(model, corpus, tokenizer, config, progress)
            if config.eval.retriever is not None:
                from landmark.evaluation.half_sentences import evaluate_half_sentences

                streams = {split: corpus.split(split) for split in ("validation", config.eval.split)}
                return evaluate_half_sentences(model, streams, tokenizer, config, progress)
            results = evaluate(model, corpus.split(config.eval.split), tokenizer, config, progress)
        undefined = {key: None for key, value in results.items() if key.endswith("_se") and not math.isfinite(value)}
        chosen = {"cutoffs": config.cmt.cutoffs} if config.cmt.cutoffs is not None else {}
        return results | undefined | chosen  # one segment has no standard error

    def _with_cutoffs(self, model: "Decoder", config: Config, folder: Path, name: str) -> Config:
        """With the cutoff of each layer chosen. What was measured for it is kept beside the run, for the next row."""
        from landmark.evaluation import choose_cutoffs

        stream = cast("Stream", self.corpus(config).split("validation"))
        run = identity.digest(self.run_settings(config))
        kept = identity.digest(identity.layer_cutoffs_settings(config, run, stream.sha256))
        with ProgressBar(f"{name}, cutoffs") as progress:
            chosen = choose_cutoffs(
                model, stream, self.tokenizer(config), config, folder / f"cutoffs-{kept}.json", progress
            )
        return replace(config, cmt=replace(config.cmt, cutoff=0.0, cutoffs=chosen, per_layer=False))


def train_run(config: Config, folder: Path, group: str, run: str) -> dict[str, Any]:
    """Train here, or in one process per device where there are several. Returns the run's summary."""
    processes = device_count(config)
    if processes == 1:
        return _train_here(config, folder, group, run)
    write_json(folder / CONFIG, {"config": to_dict(replace(config, rows={}, compare={})), "group": group, "run": run})
    train_together("landmark.experiment.runner", folder, processes)
    return read_json(folder / SUMMARY)


def _train_here(config: Config, folder: Path, group: str, run: str) -> dict[str, Any]:
    import torch

    from landmark.models import build
    from landmark.training import train

    workshop = Workshop(config.output)
    tokenizer, corpus = workshop.tokenizer(config), workshop.corpus(config)
    set_threads(config)
    torch.manual_seed(config.seed)
    model = build(config.model, tokenizer, config.cmt.enabled, workshop.ensure_start(config, group))
    with training_loggers(config, run, group=group, corpus=corpus, folder=folder) as loggers:
        try:
            return train(model, corpus, tokenizer, config, folder, loggers, workshop.run_settings(config))
        except SystemExit as stop:
            if stop.code == 1:  # what Lightning makes of an interrupt
                raise KeyboardInterrupt from stop
            raise  # of a signal: the job may be queued again by now


def device_count(config: Config) -> int:
    """Processes that a training takes: one per device."""
    devices = config.trainer.devices
    if isinstance(devices, int):
        return devices
    if devices != "auto":
        return int(devices) if devices.isdigit() else len([part for part in devices.split(",") if part])
    if config.trainer.accelerator == "cpu" or config.trainer.strategy == "auto":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def device(config: Config) -> str:
    """Where an evaluation runs. Raises UserError where a GPU is asked for and there is none."""
    import torch

    if config.trainer.accelerator == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if config.trainer.accelerator in ("gpu", "cuda"):
        raise UserError(f"trainer={config.trainer.name}: no GPU was found, use trainer=cpu")
    return "cpu"


def set_threads(config: Config) -> None:
    if config.trainer.threads is not None:
        import torch

        torch.set_num_threads(config.trainer.threads)


def _trained(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))


def _corpus_options(data: DataConfig) -> dict[str, Any]:
    """The settings that this corpus alone has."""
    return {"configs": data.configs, "bad_lines": data.bad_lines} if data.name == "arxiv_math" else {}


def _corpus_key(config: Config) -> tuple[Any, ...]:
    data, tokenizer = config.data, config.tokenizer
    settings = tuple((item.name, str(getattr(data, item.name))) for item in fields(data))
    return *settings, tokenizer.name, tokenizer.file, tokenizer.vocab_size


def _child(folder: Path) -> None:
    """One of several processes that train a run together, started by `train_run`."""
    launch = read_json(folder / CONFIG)
    config = from_dict(Config, launch["config"])
    summary = _train_here(config, folder, launch["group"], launch["run"])
    if os.environ["RANK"] == "0":
        write_json(folder / SUMMARY, summary)


if __name__ == "__main__":
    with errors_left_in(Path(sys.argv[1])):
        _child(Path(sys.argv[1]))
