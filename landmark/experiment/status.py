"""State of each run and row of a launch: done, running, stopped, failed or missing. Loads no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from landmark.experiment.launches import Launch
from landmark.experiment.records import Contents, Kind, Record, Records
from landmark.utils.metrics_csv import metrics_so_far

STATES = "done", "running", "stopped", "failed", "missing"
KILLED = "no error was noted: the process was killed, or its machine went down"


@dataclass(frozen=True)
class State:
    """State of a run or a row. note: the progress of one that is running, why one stopped or failed."""

    title: str
    state: str
    note: str = ""


def states_of(launch: Launch, records: Records, contents: Contents) -> list[State]:
    """The states of the runs, each once, and then of the rows."""
    attempts = {(note["kind"], note["id"]): note for note in contents.attempts}

    def state(title: str, kind: Kind, identity: str, is_done: bool) -> State:
        attempt = attempts.get((kind, identity))
        if is_done or attempt is None:
            return State(title, "done" if is_done else "missing")
        return State(title, *_state_of(attempt, records))

    runs: dict[str, State] = {}
    rows = []
    for name, entries in launch.rows.items():
        if not entries:
            rows.append(State(f"row {name}", "missing"))
        for entry in entries:
            if entry.run_name is not None and entry.run_name not in runs:
                runs[entry.run_name] = state(f"run {entry.run_name}", "runs", entry.run, entry.run in contents.runs)
            title = name if len(entries) == 1 else f"{name} seed {entry.seed}"
            rows.append(state(f"row {title}", "rows", entry.row, entry.row in contents.rows))
    return [*runs.values(), *rows]


def free_states(records: Records, contents: Contents, launches: Sequence[Launch]) -> list[str]:
    """Lines on the runs and rows of no experiment: free sweeps and single rows. Empty where there are none."""
    entries = [entry for launch in launches for each in launch.rows.values() for entry in each]
    rows, runs = {entry.row for entry in entries}, {entry.run for entry in entries}
    done = [contents.rows[key] for key in contents.rows.keys() - rows]
    notes = [note for note in contents.attempts if note["id"] not in rows | runs]
    counts = Counter(_state_of(note, records)[0] for note in notes)
    counts["done"] = len(done)
    if not done and not notes:
        return []
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    return [
        f"no experiment: {summary}",
        *(f"  {_title(note)}  {'  '.join(_state_of(note, records))}" for note in notes),
    ]


def _title(note: Record) -> str:
    key = "run" if note["kind"] == "runs" else "row"
    name = Path(str(note["labels"].get(key, note["id"]))).name
    return f"{note['kind'].removesuffix('s')} {name}"


def describe(launch: Launch, states: Sequence[State], *, command: str | None = None, is_brief: bool = False) -> str:
    """Counts, a line for each run and row, and the command that makes the rest.

    Args:
        launch: an experiment as it was launched.
        states: of its runs and rows (`states_of`).
        command: the command that makes the rest; None: the one of the launch.
        is_brief: missing runs and rows share a line, and those that are done have none.
    """
    counts = Counter(each.state for each in states)
    summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    shown = [each for each in states if not is_brief or each.state not in ("done", "missing")]
    width = max((len(each.title) for each in shown), default=0)
    lines = [f"  {each.title:<{width}}  {each.state:<7}  {each.note}".rstrip() for each in shown]
    if is_brief and counts["missing"]:
        lines.append(f"  missing: {', '.join(each.title for each in states if each.state == 'missing')}")
    if counts["done"] < len(states):
        lines.append(f"  the rest: {command or launch.command}")
    return "\n".join([f"{launch.experiment} ({launch.settings}): {summary}", *lines])


def _state_of(attempt: Record, records: Records) -> tuple[str, str]:
    """State and note of work that has no record."""
    progress = _progress(attempt, records) if attempt["kind"] == "runs" else ""
    if records.is_locked(attempt["kind"], attempt["id"]):
        return "running", f"{progress}since {attempt['time']}, process {attempt['pid']} on {attempt['host']}"
    return "stopped" if attempt.get("stopped") else "failed", progress + (attempt["error"] or KILLED)


def _progress(attempt: Record, records: Records) -> str:
    """The last measured step of a training."""
    metrics = metrics_so_far(records.output / "runs" / Path(str(attempt["labels"].get("run", ""))).name)
    train = attempt["settings"].get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    if not isinstance(steps, int):  # of a note that somebody edited
        return ""
    return f"step {metrics[-1]['step']:,.0f} of {steps:,}, " if metrics else ""
