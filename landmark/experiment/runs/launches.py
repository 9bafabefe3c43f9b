"""Launches: an experiment with the settings of a command line, and how far its runs and rows are.

Nothing is noted of a launch. Records say what is done, and a lock what a process is at work on. Loads no torch.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from landmark.experiment.config import Config
from landmark.experiment.config.command_line import override_key
from landmark.experiment.config.saved import trained_with
from landmark.experiment.config.schema import CLIPPING
from landmark.experiment.runs.identity import digest
from landmark.experiment.runs.jobs import Job
from landmark.experiment.runs.records import Contents, Records
from landmark.utils.checkpoints import step_kept
from landmark.utils.errors import UserError, counted
from landmark.utils.metrics_csv import metrics_so_far

# Keys of one command alone, and keys that decide no number: launches that differ in them are the same launch.
_WITHOUT_EFFECT = ("output", "row", "run", "task", "logger", "trainer", "data.cache", "tokenizer.file")
_WITHOUT_EFFECT += ("eval.batch_size", "train.micro_batch", "train.checkpoint_every")
_TITLED = ("experiment", "size", "data", "tokenizer", "data.path")  # which a title names anyway
STATES = "done", "running", "stopped", "missing"


def launch_title(config: Config, overrides: Sequence[str], tokenizer: str) -> str:
    """Experiment, size, data, tokenizer and the other settings that decide numbers."""
    rest = [word for word in _effective(overrides) if override_key(word) not in _TITLED]
    return f"{config.name} ({', '.join([config.size, config.data.name, tokenizer, *rest])})"


def launch_id(config: Config, overrides: Sequence[str]) -> str:
    """Identity of an experiment with these overrides, whatever its rows."""
    return digest({"experiment": config.name, "overrides": sorted(_effective(overrides))})


@dataclass(frozen=True)
class State:
    """State of a run or a row. note: the progress of a training."""

    title: str
    state: str
    note: str = ""


def states_of(jobs: Sequence[Job], records: Records, contents: Contents) -> list[State]:
    """The states of the runs that rows need, each once, and then of the rows."""
    runs: dict[str, State] = {}
    rows, seeds = [], Counter(job.name for job in jobs)
    for job in jobs:
        for run in job.run.trainings:
            if run.folder.name not in runs:
                runs[run.folder.name] = _state_of_run(run.folder, run.id, run.config, records, contents)
        title = f"row {job.name}" if seeds[job.name] == 1 else f"row {job.name} seed {job.config.seed}"
        running = "running" if records.is_locked("rows", job.id) else "missing"
        rows.append(State(title, "done" if job.id in contents.rows else running))
    return [*runs.values(), *rows]


def unfinished(records: Records, contents: Contents) -> dict[str, list[State]]:
    """By experiment, the trainings of an output folder that have begun and have no record."""
    found: dict[str, list[State]] = {}
    for folder in sorted((records.output / "runs").glob("*")):
        identity = folder.name.rpartition("-")[2]
        with suppress(UserError):  # of a damaged file
            if identity not in contents.runs and (config := trained_with(folder)) is not None:
                state = _state_of_run(folder, identity, config, records, contents)
                found.setdefault(config.name, []).append(state)
    return found


def done(contents: Contents) -> dict[str, list[str]]:
    """By experiment, a line for each size, data and tokenizer: how many rows are done, and the last one's command."""
    groups: dict[tuple[str, str], list[str]] = {}
    for record in sorted(contents.rows.values(), key=lambda record: record["provenance"]["time"]):
        labels = record["labels"]
        place = ", ".join(labels[key] for key in ("size", "data", "tokenizer"))
        groups.setdefault((labels["experiment"], place), []).append(record["provenance"]["command"])
    found: dict[str, list[str]] = {}
    for (name, place), commands in groups.items():
        line = f"{name} ({place}): {counted(len(commands), 'row')} done, the last by {commands[-1]!r}"
        found.setdefault(name, []).append(line)
    return found


def describe(title: str, states: Sequence[State], command: str) -> str:
    """Counts, a line for each run and row, and the command for the rest."""
    counts = Counter(each.state for each in states)
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    rest = [f"  the rest: {command}"] if counts["done"] < len(states) else []
    return "\n".join([f"{title}: {summary}", *lines_of(states), *rest])


def lines_of(states: Sequence[State]) -> list[str]:
    """A line for each state, in columns."""
    width = max((len(each.title) for each in states), default=0)
    return [f"  {each.title:<{width}}  {each.state:<7}  {each.note}".rstrip() for each in states]


def _state_of_run(folder: Path, identity: str, config: Config, records: Records, contents: Contents) -> State:
    title = f"run {folder.name}"
    if identity in contents.runs:
        return State(title, "done")
    metrics, kept = metrics_so_far(folder), step_kept(folder)
    reached, steps = max([kept, *(row["step"] for row in metrics[-1:])]), f"of {config.train.steps:,}"
    if records.is_locked("runs", identity):
        return State(title, "running", f"step {reached:,} {steps}" if reached else "")
    if reached:
        return State(title, "stopped", f"step {kept:,} {steps}" if kept else f"no checkpoint yet, step 0 {steps}")
    return State(title, "missing")


def _effective(overrides: Sequence[str]) -> list[str]:
    """The overrides that decide numbers."""
    return [
        word
        for word in overrides
        if override_key(word).removeprefix("trainer.") in CLIPPING
        or not any(override_key(word) == key or override_key(word).startswith(f"{key}.") for key in _WITHOUT_EFFECT)
    ]
