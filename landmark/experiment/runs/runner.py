"""From a row to its record: what is missing is made, what has a record is read. Nothing is made twice."""

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from landmark.experiment.config import Config
from landmark.experiment.config.command_line import typed_words
from landmark.experiment.config.rows import Row
from landmark.experiment.config.saved import write_launch
from landmark.experiment.runs.jobs import RUN, Inputs, Job, Run, has_weights, job_of, read_run
from landmark.experiment.runs.processes import device_count, tell
from landmark.experiment.runs.records import Record, Records, sweep
from landmark.experiment.tracking.tracker import Tracker
from landmark.utils.collection import without_collection
from landmark.utils.errors import Diverged, UserError
from landmark.utils.files import write_json
from landmark.utils.hardware import cores, device_of, leave_busy_cores, return_memory, set_up_cpu
from landmark.utils.progress import progress_bar
from landmark.utils.team import started_together
from landmark.utils.trust import name_modules

if TYPE_CHECKING:
    from landmark.experiment.data import Tokenizer
    from landmark.experiment.data.stream import Stream
    from landmark.models import DecoderConfig, LanguageModel

_log = logging.getLogger(__name__)


class Runner:
    """Makes the runs and rows that are missing below one output folder.

    1. `jobs`: each row of each seed gets its identity, once; corpora are prepared for it.
    2. `check`: whatever can be refused is refused before the first training.
    3. `evaluate`: a row that has a record is read. Else `train` makes its run, and the row is evaluated and recorded.
       Locks let one process at a time make a run or a row; `in_turn` lets another make the rest meanwhile.
    """

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)
        self.records = Records(output)
        self.inputs = Inputs()
        self.tracker = Tracker()

    def jobs(self, rows: Sequence[Row], *, prepare: bool = True) -> list[Job]:
        """What the rows need, in their order. prepare: what killed processes have left is deleted, and corpora are
        prepared; else see `landmark.experiment.runs.jobs.job_of`.
        """
        if prepare:
            sweep(self.records, {config.data.cache for row in rows for config in row.configs})
        return [job_of(row, config, self.inputs, prepare=prepare) for row in rows for config in row.configs]

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise UserError where an evaluation does not fit its text, or a training its devices."""
        for job in jobs:
            if not self.records.path("rows", job.id).exists():
                self._check_text(job)
        for run in {run.id: run for job in jobs for run in job.run.trainings}.values():
            if not self.is_trained(run):
                self._check_devices(run.config)

    def in_turn(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """The jobs, and those that another process is at work on last."""
        left = list(jobs)
        while left:
            job = next((job for job in left if not self._is_elsewhere(job)), left[0])
            left.remove(job)
            yield job

    def _is_elsewhere(self, job: Job) -> bool:
        """Whether another process makes a row without a record, or the run that it needs."""
        locked = self.records.is_locked("rows", job.id) or any(
            self.records.is_locked("runs", run.id) and not self.is_trained(run) for run in job.run.trainings
        )
        return locked and self.records.find("rows", job.id) is None

    def evaluate(self, job: Job) -> tuple[Record, bool]:
        """The record of a row, and whether it was made now."""
        record = self.records.find("rows", job.id)
        if is_new := record is None:
            self.train(job.run)
            with self.records.lock("rows", job.id):
                record = self.records.find("rows", job.id)  # another process may have made it meanwhile
                if is_new := record is None:
                    record = self._evaluate(job)
        self.tracker.row(job.config, record, self.records.path("rows", job.id), is_new=is_new)
        return record, is_new

    def train(self, run: Run) -> bool:
        """Train a run, and first the one it starts from, unless they are trained. Returns whether it was."""
        is_new = run.start is not None and self.train(run.start)
        if run.is_given:
            self._check_weights(run)
            return is_new
        with self.records.lock("runs", run.id):
            has_record = self.records.find("runs", run.id) is not None
            if has_record and run.is_trained:
                self._check_weights(run)
                return False
            if has_record:
                _log.warning("%s has a record but no weights: training it again", run.folder)
            self._train(run)
        return_memory()
        return True

    def _check_weights(self, run: Run) -> None:
        """Raise UserError where a run that has a record has other weights than when that was written."""
        record = self.records.find("runs", run.id)
        if record is not None and record["provenance"].get("weights") != run.weights:
            raise UserError(
                f"{run.folder}: its weights, or their hashes, are not those of its record: put them back, or delete "
                f"{self.records.path('runs', run.id)} to train it again"
            )

    def is_trained(self, run: Run) -> bool:
        """Whether an evaluation finds the weights that it needs."""
        if run.is_given:
            return run.start is None or self.is_trained(run.start)
        return self.records.find("runs", run.id) is not None and run.is_trained

    def _evaluate(self, job: Job) -> Record:
        config = job.config
        labels = self._labels(job.run) | {
            "seed": config.seed,
            "block_size": config.model.block_size,
            "row": job.name,
            "experiment": config.name,
            "overrides": job.overrides,
            "run": str(job.run.folder),
        }
        try:
            results = evaluate_row(job, self.inputs)
        except OverflowError as error:  # of a perplexity
            raise Diverged(
                f"diverged: a loss of {job.run.folder} is beyond what numbers hold: train with a lower train.max_lr"
            ) from error
        return self.records.write("rows", job.id, job.settings, labels, results, job.run.weights)

    def _train(self, run: Run) -> None:
        labels = self._labels(run) | {"seed": run.config.seed, "experiment": run.config.name}
        results = train_run(run, self.inputs)
        from landmark.experiment.training import discard_checkpoints  # loads torch, which names the GPUs to the record

        self.records.write("runs", run.id, run.settings, labels, results, run.weights)
        discard_checkpoints(run.folder)

    def _labels(self, run: Run) -> dict[str, Any]:
        config = run.config
        return {"size": config.size, "data": config.data.name, "tokenizer": self.inputs.tokenizer(config).name}

    def _check_devices(self, config: Config) -> None:
        """Raise UserError where devices cannot share the batches of a training, or their processes are not started."""
        processes, batch = device_count(config), config.train.batch_size
        if batch % processes:
            raise UserError(
                f"train.batch_size={batch} cannot be shared evenly by {processes} devices: "
                f"set trainer.devices to a number that divides it"
            )
        if processes > 1 and started_together() is None:
            words = typed_words()
            words = words[1:] if words[0] == "python" else ["--no-python", *words]
            torchrun = ["torchrun", "--standalone", f"--nproc-per-node={processes}", *words]
            raise UserError(f"{processes} devices train in as many processes: start them by `{shlex.join(torchrun)}`")

    def _check_text(self, job: Job) -> None:
        from landmark.experiment.data import SyntheticCorpus, segments
        from landmark.experiment.data.evaluation_texts import copies

        settings, corpus = job.config.eval, self.inputs.evaluated(job.config)
        if isinstance(corpus, SyntheticCorpus):
            corpus.prompts(settings.split, settings.length, 1)
            return
        if settings.probe is not None:
            copies(settings, cast("Stream", corpus.split(settings.split)))
            return
        segments(len(corpus.split(settings.split)), settings.length, settings.tokens, settings.span)


def train_run(run: Run, inputs: Inputs) -> dict[str, Any]:
    """Train a run, or go on from its newest checkpoint. Returns its results (see `training.train`)."""
    write_json(run.folder / RUN, run.settings)
    write_launch(run.folder, run.config)
    config = run.config
    if (team := started_together()) is not None:
        config = replace(config, trainer=replace(config.trainer, devices=team.local_size))  # of this machine
    given = config, run.folder.absolute(), run.id, run.start_from, run.settings
    if team is not None:
        tell(given)
    return train_here(*given, inputs)


def train_here(
    config: Config,
    folder: Path,
    run: str,
    start_from: str | None,
    settings: dict[str, Any],
    inputs: Inputs | None = None,
) -> dict[str, Any]:
    """Train in this process. run: its identity. settings: that decide the weights."""
    import torch

    from landmark.experiment.training import train
    from landmark.models import build

    name_modules((config.model.architecture, config.data.name))  # as in the process that told this one to train
    inputs = inputs or Inputs()
    tokenizer, corpus = inputs.tokenizer(config), inputs.corpus(config)
    set_up_processor(config)
    if device_of(config.trainer.accelerator) == "cpu" and (said := leave_busy_cores(advise=True)):
        _log.warning(said)
    torch.manual_seed(config.seed)
    model = build(config.model, tokenizer, config.cmt.enabled, start_from)
    with Tracker().training(config, run, corpus, folder) as loggers:
        try:
            return train(model, corpus, tokenizer, config, folder, loggers, settings)
        except SystemExit as stop:
            if stop.code == 1:  # Lightning turns an interrupt into this exit
                raise KeyboardInterrupt from stop
            raise  # a signal's exit: the job may be queued again by now


def evaluate_row(job: Job, inputs: Inputs) -> dict[str, Any]:
    """The results of a row whose run is trained; of text also documents, the first tokens of those that were read."""
    from landmark.experiment.data import SyntheticCorpus
    from landmark.experiment.data.evaluation_texts import document_starts
    from landmark.experiment.evaluation.rows import evaluate, evaluate_copy, evaluate_masked, evaluate_recall
    from landmark.models import decoder_config

    config, tokenizer, corpus = job.config, inputs.tokenizer(job.config), inputs.evaluated(job.config)
    set_up_processor(config)
    shape = decoder_config(config.model, tokenizer, config.cmt.enabled)
    model = _loaded(config, job.run.folder, shape)
    with progress_bar(job.name) as progress:
        if isinstance(corpus, SyntheticCorpus):
            return evaluate_recall(model, corpus, tokenizer, config, progress)
        stream = corpus.split(config.eval.split)
        if config.eval.probe is not None:
            results = evaluate_copy(model, stream, config, progress)
        elif config.model.masked:
            results = evaluate_masked(model, stream, tokenizer, config, progress)
        else:
            results = evaluate(model, stream, tokenizer, config, progress)
    firsts = [first for first, *_ in results["segments"]]
    return results | {"documents": document_starts(stream.tokens, tokenizer.eot, firsts)}


@without_collection()
def load_trained(config: Config, folder: Path, inputs: Inputs) -> "tuple[LanguageModel, Tokenizer]":
    """The model in a folder, and its tokenizer. Raises UserError where it is untrained or has another tokenizer."""
    from landmark.models import decoder_config

    tokenizer = inputs.tokenizer(config)
    if not has_weights(folder):
        raise UserError(f"{folder} has no trained model: train it with task=train, or name another run=NAME")
    set_up_processor(config)
    shape = decoder_config(config.model, tokenizer, config.cmt.enabled) if config.model.as_is else None
    if shape is None and (stored := read_run(folder)["tokenizer"]) != tokenizer.hash:
        raise UserError(
            f"{folder} was trained with another tokenizer ({stored[:10]}…) than tokenizer={tokenizer.name}: "
            "set tokenizer= to the one it was trained with"
        )
    return _loaded(config, folder, shape), tokenizer


def _loaded(config: Config, folder: Path, shape: "DecoderConfig | None") -> "LanguageModel":
    from landmark.models import load

    device = device_of(config.trainer.accelerator)
    return load(folder, shape, device, config.model.reading_dtype, config.model.bits)


def set_up_processor(config: Config) -> None:
    """Set torch's threads, shared by processes of one training, and oneDNN's float32 products where they are exact."""
    import torch

    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    elif (team := started_together()) is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // team.local_size))
    elif config.task in ("generate", "chat") and (said := leave_busy_cores()):
        print(said, file=sys.stderr)
    if config.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        set_up_cpu()
