"""From a row to its record: what is missing is made, what has a record is read. Nothing is made twice."""

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from landmark.config import Config
from landmark.config.checks import beyond_training, large_vocabulary
from landmark.config.rows import Row
from landmark.experiment import plan
from landmark.experiment.evaluation import evaluate_row
from landmark.experiment.inputs import Inputs
from landmark.experiment.jobs import Job, Run, jobs_of, planned_jobs
from landmark.experiment.processes import device_count
from landmark.experiment.records import Record, Records, sweep
from landmark.experiment.training import train_run
from landmark.tracking.tracker import Tracker
from landmark.utils.errors import Diverged, UserError
from landmark.utils.hardware import cores

_log = logging.getLogger(__name__)


class Runner:
    """Makes the runs and rows that are missing below one output folder.

    1. `jobs`: each row of each seed gets its identity, once; corpora are prepared for it.
    2. `check`: whatever can be refused is refused before the first training.
    3. `evaluate`: a row that has a record is read. Else `train` makes its run unless it is trained, the row is
       evaluated, and its record written. A lock lets one process at a time make a run or a row; `in_turn` lets another
       make the rest meanwhile.
    """

    def __init__(self, output: str | Path) -> None:
        self.output = Path(output)
        self.records = Records(output)
        self.inputs = Inputs()
        self.tracker = Tracker()
        self._sentences: set[tuple[str, int, int]] = set()  # checked already
        self._checked: set[str] = set()  # identities of the runs that are checked already

    def jobs(self, rows: Sequence[Row]) -> list[Job]:
        """What the rows need, in their order. What killed processes have left is deleted first.

        Raises UserError where a corpus or a tokenizer cannot be used.
        """
        sweep(self.records, {config.data.cache for row in rows for config in row.configs})
        return [job for row in rows for job in jobs_of(row, self.inputs)]

    def planned_jobs(self, rows: Sequence[Row]) -> list[Job]:
        """The same without preparing a corpus (see `landmark.experiment.jobs.planned_jobs`)."""
        return [job for row in rows for job in planned_jobs(row, self.inputs)]

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise UserError where an evaluation does not fit its text, or a training its devices."""
        for message in dict.fromkeys(large_vocabulary(job.config) for job in jobs if not self.is_trained(job.run)):
            if message is not None:
                _log.warning("%s", message)
        for job in jobs:
            self._check_text(job)
            run = job.run.training
            while run is not None and run.id not in self._checked:
                if not self.is_trained(run):
                    self._check_devices(run.config)
                    self._check_duration(run)
                self._checked.add(run.id)
                run = run.start

    def in_turn(self, jobs: Sequence[Job]) -> Iterator[Job]:
        """The jobs, and those that another process is at work on only where nothing else is left to do."""
        left = list(jobs)
        while left:
            job = next((job for job in left if not self._is_elsewhere(job)), left[0])
            left.remove(job)
            yield job

    def _is_elsewhere(self, job: Job) -> bool:
        """Whether another process makes a row without a record, or the run that it needs."""
        runs = (run for run in (job.run, job.run.start) if run is not None)
        locked = self.records.is_locked("rows", job.id) or any(
            self.records.is_locked("runs", run.id) and not self.is_trained(run) for run in runs
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
        if is_new or self.tracker.wants_known_rows:
            self.tracker.row(job.config, record, self.records.path("rows", job.id))
        return record, is_new

    def train(self, run: Run) -> bool:
        """Train a run, and first the one it starts from, unless they are trained. Returns whether it was."""
        is_new = run.start is not None and self.train(run.start)
        if run.is_given:
            return is_new
        with self.records.lock("runs", run.id):
            has_record = self.records.find("runs", run.id) is not None
            if has_record and run.is_trained:
                return False
            if has_record:
                _log.warning("%s has a record but no weights: training it again", run.folder)
            self._train(run)
        return True

    def is_trained(self, run: Run) -> bool:
        """Whether an evaluation finds the weights that it needs."""
        if run.is_given:
            return run.start is None or self.is_trained(run.start)
        return self.records.find("runs", run.id) is not None and run.is_trained

    def _evaluate(self, job: Job) -> Record:
        config = job.config
        if (warning := beyond_training(config)) is not None:
            _log.warning("%s: %s", job.name, warning)
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
        return self.records.write("rows", job.id, job.settings, labels, results)

    def _train(self, run: Run) -> None:
        labels = self._labels(run) | {"seed": run.config.seed, "experiment": run.config.name}
        results = train_run(run, self.inputs)
        from landmark.training import discard_checkpoints  # loads torch, which names the GPUs to the record

        self.records.write("runs", run.id, run.settings, labels, results)
        discard_checkpoints(run.folder)

    def _labels(self, run: Run) -> dict[str, Any]:
        config = run.config
        return {"size": config.size, "data": config.data.name, "tokenizer": self.inputs.tokenizer(config).name}

    def _check_devices(self, config: Config) -> None:
        """Raise UserError where devices cannot share the batches of a training evenly."""
        processes, batch = device_count(config), config.train.batch_size
        if batch % processes:
            raise UserError(
                f"train.batch_size={batch} cannot be shared evenly by {processes} devices: "
                f"set trainer.devices to a number that divides it"
            )

    def _check_duration(self, run: Run) -> None:
        """Raise UserError where a training would take days on a CPU."""
        config, place = run.config, run.config.trainer.accelerator
        if config.model.name is not None or place not in ("auto", "cpu"):
            return
        cost = plan.run_cost(run.folder.name, config, self.inputs.tokenizer(config).vocab_size, is_done=False)
        if place == "auto" and plan.too_long(cost, plan.Machine(cores(), 0, [])) is not None:
            import torch

            if torch.cuda.is_available():
                return
        if (message := plan.too_long(cost, self._processor)) is not None:
            raise UserError(message)

    @cached_property
    def _processor(self) -> plan.Machine:
        """This machine without its GPUs, and the trainings so far."""
        return plan.Machine(cores(), 0, list(self.records.read_all().runs.values()))

    def _check_text(self, job: Job) -> None:
        from landmark.data import SyntheticCorpus, segments, task_corpus
        from landmark.data.evaluation_texts import probe_texts
        from landmark.data.stream import Stream

        settings, corpus = job.config.eval, self.inputs.corpus(job.config)
        if settings.task is not None:
            stream = cast(Stream, corpus.split(settings.split))
            corpus = task_corpus(job.config, stream, self.inputs.tokenizer(job.config))
        if isinstance(corpus, SyntheticCorpus):
            corpus.check(settings.split, settings.length)
            return
        if settings.probe is not None:
            probe_texts(settings, cast(Stream, corpus.split(settings.split)), self.inputs.tokenizer(job.config))
            return
        if settings.retriever is not None:
            self._check_sentences(job)
        segments(len(corpus.split(settings.split)), settings.length, settings.tokens, settings.span)

    def _check_sentences(self, job: Job) -> None:
        """Raise UserError where a split has too few sentences to look for; once for rows that look for the same."""
        from landmark.data.evaluation_texts import document_texts, sentence_queries
        from landmark.data.stream import Stream

        config, corpus = job.config, self.inputs.corpus(job.config)
        for split in dict.fromkeys(("validation", config.eval.split)):
            stream = cast(Stream, corpus.split(split))
            key = stream.sha256, config.eval.prompts, config.seed
            if key not in self._sentences:
                texts = document_texts(stream, self.inputs.tokenizer(config))
                sentence_queries(texts, config.eval.prompts, config.seed)
                self._sentences.add(key)
