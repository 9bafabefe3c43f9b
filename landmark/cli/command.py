"""What a command line asks for: the configuration, its rows, and how they are prepared, trained and evaluated."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from landmark.experiment.config import Config
from landmark.experiment.config.checks import check_task, unused
from landmark.experiment.config.command_line import override_key, started, suggested_command
from landmark.experiment.config.rows import Compose, Row, compose_job, named, parse, select
from landmark.experiment.config.schema import TASKS
from landmark.experiment.results.columns import COLUMNS, Source, TableRow, text_of
from landmark.experiment.results.tables import check_figure
from landmark.experiment.runs.jobs import Job, Run, check, with_settings_of_run
from landmark.experiment.runs.records import Record
from landmark.experiment.runs.runner import Runner
from landmark.utils.errors import Diverged, UserError, counted

_SAID = ("perplexity", "bits_per_byte", "first_copy", "second_copy", "accuracy")


@dataclass
class Evaluated:
    """records: one per seed of each row that has them all. made: how many now. diverged: names of other rows."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    made: int = 0
    diverged: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise Diverged where rows diverged."""
        if self.diverged:
            names = list(dict.fromkeys(self.diverged))
            count = counted(len(names), "row")
            raise Diverged(f"{count} diverged and left no record: {', '.join(names)}; the lines above say where")


@dataclass(frozen=True)
class Command:
    """overrides: those of the command line. rows: those that it asks for, composed and checked. records: of rows that
    it has evaluated, or of runs that it has trained.
    """

    config: Config
    overrides: list[str]
    rows: list[Row]
    runner: Runner
    records: list[Record] = field(default_factory=list)

    @classmethod
    def of(cls, config: Config, overrides: list[str], compose: Compose = compose_job) -> "Command":
        """Raises UserError where a setting or a row makes no sense."""
        for place in (Path(config.output), Path(config.output) / "runs"):
            _check_output(place)
        config = with_settings_of_run(config, overrides)
        if config.task not in ("auto", *TASKS):
            raise UserError(f"task={config.task}: must be one of auto, {', '.join(TASKS)}")
        check_task(config)
        check_figure(config.figure)
        return cls(config, overrides, select(config, overrides, compose, check), Runner(config.output))

    @property
    def is_experiment(self) -> bool:
        """Whether the configuration has named rows."""
        return bool(named(self.config))

    @property
    def first_config(self) -> Config:
        """That of the first row."""
        return self.rows[0].configs[0]

    @property
    def unused(self) -> UserError | None:
        """An error that names an override without an effect on the first row; None where each has one."""
        return unused([each.key_or_group for each in parse(self.overrides)], [self.first_config])

    @property
    def objective(self) -> float | None:
        """What a sweeper such as Optuna's minimises: the mean perplexity of the command's records, of a task's answers
        the accuracy, of trainings the perplexity of the validation split.
        """
        results = [record["results"] for record in self.records]
        for key in ("perplexity", "accuracy", "validation_perplexity"):
            if results and all(key in each for each in results):
                return sum(each[key] for each in results) / len(results)
        return None

    def jobs(self, rows: Sequence[Row] | None = None) -> list[Job]:
        """The jobs of the rows (None: the command's), checked. Raises UserError where one of them cannot be made."""
        jobs = self.runner.jobs(self.rows if rows is None else rows)
        self.runner.check(jobs)
        return jobs

    def only_config(self) -> Config:
        """The configuration of a task that takes one trained model. Raises UserError where there are several rows."""
        if len(self.rows) > 1:
            raise UserError(f"task={self.config.task}: {len(self.rows)} rows, choose one with row=NAME")
        return self.first_config

    def suggest(self, *more: str, multirun: bool = False) -> str:
        """This command line for the whole experiment, with other overrides (`more`), to be typed next."""
        parsed = parse(self.overrides)
        if started().number is not None:  # of several experiments this one
            more = (*(word for word in self.overrides if override_key(word) == "experiment"), *more)
        is_sweep = any(each.is_sweep_override() for each in parsed)
        is_free = all(each.key_or_group != "experiment" for each in parsed)
        return suggested_command(*more, multirun=multirun or (is_sweep and is_free))

    def prepare(self) -> None:
        """Tokenise the corpora of the rows, and print the folder and sizes of each. Of one that was prepared before the
        texts are compared.
        """
        seen = set()
        for config in (config for row in self.rows for config in row.configs):
            inputs = self.runner.inputs
            was_prepared = inputs.prepared_corpus(config) is not None
            corpus = inputs.corpus(config)
            if corpus.folder not in seen:
                seen.add(corpus.folder)
                if was_prepared and inputs.has_same_texts(config):
                    print(f"{corpus.folder}: its files were read again, and have the same texts")
                splits = corpus.manifest["splits"].items()
                sizes = ", ".join(f"{name} {split['tokens']:,} tokens" for name, split in splits)
                print(f"{corpus.folder}: {sizes or 'nothing to prepare'}")

    def train(self) -> None:
        """Train the runs that the rows need, or the one that `run` names. Raises UserError where there is none."""
        config = self.config
        rows = [replace(row, configs=[replace(one, run=None) for one in row.configs]) for row in self.rows]
        runs: dict[str, Run] = {}
        for job in self.jobs(rows):
            runs |= {run.folder.name: run for run in reversed(job.run.trainings)}
        if not runs:
            raise UserError(f"task=train: {config.name} trains nothing, its models are read as they are")
        if config.run is not None:
            name = Path(config.run).name
            if name not in runs:
                raise UserError(f"run={config.run}: no run of {config.name} (one of {', '.join(runs)})")
            runs = {name: runs[name]}
        for run in runs.values():
            is_new = self.runner.train(run)
            self.records.extend(filter(None, [self.runner.records.find("runs", run.id)]))
            print(f"{run.folder}: {'trained now' if is_new else 'trained before'}")

    def evaluate(self) -> Evaluated:
        """Train what is missing, evaluate the rows, and print a line for each. One that fails ends no others."""
        jobs = self.jobs()
        if started().launcher not in (None, "joblib"):  # on this machine they wait for one that trains
            self._check_trained(jobs)
        done, names, lost = Evaluated(), [row.name for row in self.rows], set()
        number = started().number if not self.is_experiment else None

        def place(at: int) -> str:
            return f"[{at}/{len(names)}]" if number is None else f"#{number}"

        found: dict[str, Record] = {}  # by their rows' identities
        for job in self.runner.in_turn(jobs):
            title = f"{place(names.index(job.name) + 1)} {job.name}"
            try:
                if lost & {run.id for run in job.run.trainings}:
                    raise Diverged("its run diverged")
                record, is_new = self.runner.evaluate(job)
                found[job.id] = record
                self.records.append(record)
                done.made += is_new
                print(f"{title}: {summary(record, is_new)}, {job.run.folder}")
            except Diverged as error:
                print(f"{title}: {error}")
                done.diverged.append(job.name)
                lost |= {run.id for run in job.run.trainings if not self.runner.is_trained(run)}
        for job in jobs:
            if job.name not in done.diverged:
                done.records.setdefault(job.name, []).append(found[job.id])
        return done

    def _check_trained(self, jobs: Sequence[Job]) -> None:
        """Raise UserError where a run is not trained yet: jobs of a cluster would wait for one to train it."""
        new = [job for job in jobs if self.runner.records.find("rows", job.id) is None]
        missing = [job for job in new if not self.runner.is_trained(job.run)]
        if missing:
            runs = ",".join(dict.fromkeys(job.run.folder.name for job in missing))
            suggested = self.suggest("task=train", f"run={runs}", *started().launcher_words, multirun=True)
            raise UserError(f"row {missing[0].name}: its run is not trained yet, `{suggested}` trains it")


def summary(record: Record, is_new: bool) -> str:
    """What a row measured, in the words of its table. is_new: whether it was evaluated now."""
    row = TableRow.of(Source(record["labels"]["row"], [record], {}, "", None, text_of([record])))
    said = [f"{COLUMNS[key].title.partition(',')[0]} {row.cell(key)}" for key in _SAID if row.cell(key) != "-"]
    return ", ".join([*said, f"{record['results']['seconds']:.0f} s" if is_new else "from its record"])


def _check_output(folder: Path) -> None:
    """Raise UserError where a file is in the place of the folder, or the folder cannot be looked into."""
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"output={folder}: {place} is a file, no folder can be made there")
    if not os.access(place, os.R_OK | os.X_OK):
        raise UserError(f"output={folder}: {place} cannot be read, so what is done there is not known")
