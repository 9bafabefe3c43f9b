"""Launches: experiments with the settings of a command line, what their rows need, and how far they are.

Nothing is noted of them. conf/ has the rows of an experiment, a row's record has the overrides that made it, and a lock
says what a process is at work on. Loads no torch.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from landmark.config import Config, to_config
from landmark.config.command_line import override_key, own_folder, program
from landmark.config.rows import Compose, cells, named
from landmark.config.saved import trained_with
from landmark.experiment.identity import digest
from landmark.experiment.jobs import Job
from landmark.experiment.records import Contents, Record, Records
from landmark.utils.errors import UserError
from landmark.utils.metrics_csv import metrics_so_far

# Keys of one command alone, and keys that decide no number: launches that differ in them are the same launch.
_OF_A_COMMAND = ("output", "row", "run", "task")
_WITHOUT_EFFECT = (*_OF_A_COMMAND, "logger", "trainer", "data.cache", "tokenizer.file")
_WITHOUT_EFFECT += ("eval.batch_size", "train.micro_batch", "train.checkpoint_every")
_TITLED = ("experiment", "size", "data", "tokenizer", "data.path")  # which the settings name anyway
STATES = "done", "running", "stopped", "missing"


@dataclass(frozen=True)
class Launch:
    """An experiment as a command line launches it. tokenizer: its name. rows: name to the row's jobs, one per seed."""

    config: Config
    overrides: list[str]
    tokenizer: str
    rows: dict[str, list[Job]]

    @property
    def settings(self) -> str:
        """Size, data, tokenizer and other settings, by which launches of one experiment are told apart."""
        rest = [word for word in _effective(self.overrides) if override_key(word) not in _TITLED]
        return ", ".join([self.config.size, self.config.data.name, self.tokenizer, *rest])

    @property
    def cells(self) -> dict[str, dict[str, str]]:
        """Of rows that make up a grid, the value on each axis."""
        return cells(self.config, self.overrides)

    def command(self) -> str:
        """The command that makes what is missing."""
        own, output = own_folder(), self.config.output
        first = [*program(), *(["--config-dir", str(own)] if own else [])]
        kept = [word for word in self.overrides if override_key(word) not in _OF_A_COMMAND]
        return shlex.join([*first, *kept, *([] if output == Config.output else [f"output={output}"])])

    def found(self, contents: Contents) -> dict[str, list[Record]]:
        """Records of the rows that have one for each seed."""
        return {
            name: [contents.rows[job.id] for job in jobs]
            for name, jobs in self.rows.items()
            if all(job.id in contents.rows for job in jobs)
        }


def launch_id(config: Config, overrides: Sequence[str]) -> str:
    """Identity of an experiment with these overrides, whatever its rows."""
    kept = [word for word in _effective(overrides) if override_key(word) not in config.grid]
    return digest({"experiment": config.name, "overrides": sorted(kept)})


def launched(contents: Contents, output: Path, compose: Compose) -> list[list[str]]:
    """The overrides of the experiments that made rows, each once, by experiment and time. A row whose own overrides are
    no longer those that its experiment gives it belongs to none.
    """
    texts: dict[str, dict[str, str]] = {}
    found: dict[tuple[str, ...], list[str]] = {}
    for record in sorted(contents.rows.values(), key=lambda record: record["provenance"]["time"]):
        words, name = record["labels"].get("overrides") or [], record["labels"].get("row")
        if not all(isinstance(word, str) and word.isprintable() for word in words):
            continue
        experiment = next((word for word in words if override_key(word) == "experiment"), "")
        if experiment and experiment not in texts:
            texts[experiment] = {}
            with suppress(HydraException, OmegaConfBaseException, UserError):  # it is not in conf/ any more
                texts[experiment] = named(to_config(compose([experiment])))
        if name in texts.get(experiment, {}):
            own = shlex.split(texts[experiment][name])
            shared = words[: len(words) - len(own)]
            if [*shared, *own] == words:
                key = experiment, *sorted(_effective(shared))
                found.pop(key, None)
                kept = [word for word in shared if override_key(word) not in _OF_A_COMMAND]
                found[key] = [*kept, *([] if str(output) == Config.output else [f"output={output}"])]
    return sorted(found.values(), key=lambda words: [word for word in words if override_key(word) == "experiment"])


def rows_without_launch(contents: Contents, launches: Sequence[Launch]) -> list[Record]:
    """Records of rows that belong to none of these launches: of free sweeps, or of settings an experiment had once."""
    launched = {job.id for launch in launches for jobs in launch.rows.values() for job in jobs}
    return [record for record in contents.rows.values() if record["id"] not in launched]


@dataclass(frozen=True)
class State:
    """State of a run or a row. note: the progress of a training."""

    title: str
    state: str
    note: str = ""


def states_of(launch: Launch, records: Records, contents: Contents) -> list[State]:
    """The states of the runs, each once, and then of the rows."""
    runs: dict[str, State] = {}
    rows = []
    for name, jobs in launch.rows.items():
        for job in jobs:
            for run in job.run.trainings:
                if run.folder.name not in runs:
                    runs[run.folder.name] = _state_of_run(run.folder, run.id, run.config, records, contents)
            title = f"row {name}" if len(jobs) == 1 else f"row {name} seed {job.config.seed}"
            running = "running" if records.is_locked("rows", job.id) else "missing"
            rows.append(State(title, "done" if job.id in contents.rows else running))
    return [*runs.values(), *rows]


def unfinished(records: Records, contents: Contents) -> list[tuple[str, State]]:
    """The trainings of an output folder that have begun and have no record, each after the name of its experiment."""
    found = []
    for folder in sorted((records.output / "runs").glob("*")):
        identity = folder.name.rpartition("-")[2]
        with suppress(UserError):  # of a damaged file
            if identity not in contents.runs and (config := trained_with(folder)) is not None:
                found.append((config.name, _state_of_run(folder, identity, config, records, contents)))
    return found


def describe(launch: Launch, states: Sequence[State], *, command: str | None = None, is_brief: bool = False) -> str:
    """Counts, a line for each run and row, and the command for the rest. is_brief: not those that are done."""
    counts = Counter(each.state for each in states)
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    shown = [each for each in states if not is_brief or each.state not in ("done", "missing")]
    lines = lines_of(shown)
    if is_brief and counts["missing"]:
        lines.append(f"  missing: {', '.join(each.title for each in states if each.state == 'missing')}")
    if counts["done"] < len(states):
        lines.append(f"  the rest: {command or launch.command()}")
    return "\n".join([f"{launch.config.name} ({launch.settings}): {summary}", *lines])


def lines_of(states: Sequence[State]) -> list[str]:
    width = max((len(each.title) for each in states), default=0)
    return [f"  {each.title:<{width}}  {each.state:<7}  {each.note}".rstrip() for each in states]


def _state_of_run(folder: Path, identity: str, config: Config, records: Records, contents: Contents) -> State:
    title = f"run {folder.name}"
    if identity in contents.runs:
        return State(title, "done")
    metrics = metrics_so_far(folder)
    progress = f"step {metrics[-1]['step']:,.0f} of {config.train.steps:,}" if metrics else ""
    if records.is_locked("runs", identity):
        return State(title, "running", progress)
    return State(title, "stopped" if metrics else "missing", progress)


def _effective(overrides: Sequence[str]) -> list[str]:
    """The overrides that decide numbers."""
    return [
        word
        for word in overrides
        if not any(override_key(word) == key or override_key(word).startswith(f"{key}.") for key in _WITHOUT_EFFECT)
    ]
