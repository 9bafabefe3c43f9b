"""What is done, running, missing or failed, in words for a terminal. Makes nothing; loads no torch."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from landmark.experiment.identity import digest, run_name, run_settings
from landmark.experiment.records import Kind, Record, Records
from landmark.experiment.survey import Entry, Launch
from landmark.utils.metrics_csv import metrics_so_far

STATES = "done", "running", "failed", "missing"
KILLED = "ended without a word: killed, or its machine went down"


@dataclass(frozen=True)
class State:
    """Of a run or a row. note: how far it is, or why it failed."""

    what: str
    state: str
    note: str = ""


class Statuses:
    """States from the records, notes and locks below an output folder."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._attempts = {(note["kind"], note["id"]): note for note in records.attempts()}

    def of(self, launch: Launch) -> list[State]:
        """Runs, each once, then rows."""
        runs: dict[str, State] = {}
        made = []
        for name, entries in launch.entries.items():
            for entry in entries:
                if not entry.config.model.as_is:
                    label = run_name(entry.config, entry.run or _unknown(entry))
                    runs.setdefault(label, self._state(f"run {label}", "runs", entry.run, entry.trained is not None))
                label = name if len(entries) == 1 else f"{name} seed {entry.config.seed}"
                made.append(self._state(f"row {label}", "rows", entry.row, entry.record is not None))
        return [*runs.values(), *made]

    def _state(self, what: str, kind: Kind, identity: str | None, done: bool) -> State:
        note = self._attempts.get((kind, identity or ""))
        if done or identity is None or note is None:
            return State(what, "done" if done else "missing")
        far = self._far(note) if kind == "runs" else ""
        if self._records.is_locked(kind, identity):
            return State(what, "running", f"{far}since {note['time']}, process {note['pid']} on {note['host']}")
        return State(what, "failed", f"{far}{note['error'] or KILLED}")

    def _far(self, note: Record) -> str:
        """The last step of a training that was measured."""
        metrics = metrics_so_far(self._records.output / "runs" / Path(note["labels"]["run"]).name)
        steps = note["settings"]["train"]["steps"]
        return f"step {metrics[-1]['step']:,.0f} of {steps:,}, " if metrics else ""


def report(launch: Launch, states: Sequence[State], command: str | None = None, *, brief: bool = False) -> str:
    """Counts, a line for each run and row, and the command that does the rest.

    command: that, where it is not as it was launched. brief: what is missing is named in a line, what is done in none.
    """
    counts = Counter(each.state for each in states)
    told = f"{launch.name} ({launch.settings}): "
    told += ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    shown = [each for each in states if not brief or each.state in ("running", "failed")]
    width = max((len(each.what) for each in shown), default=0)
    lines = [f"  {each.what:<{width}}  {each.state:<7}  {each.note}".rstrip() for each in shown]
    if brief and counts["missing"]:
        lines.append(f"  missing: {', '.join(each.what for each in states if each.state == 'missing')}")
    if counts["done"] < len(states):
        lines.append(f"  the rest: {command or shlex.join(['python', 'run.py', *launch.overrides])}")
    return "\n".join([told, *lines])


def _unknown(entry: Entry) -> str:
    """In place of the identity of a run whose text is not prepared: the same for rows that need the same run."""
    return f"?{digest(run_settings(entry.config, '', ''))[:4]}"
