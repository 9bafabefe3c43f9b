"""Tables that are killed again and again, and what came of them."""

import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.survival.outcome import differences, leftovers, locked, wrong_records
from benchmarks.survival.victim import STAGES, Victim

# The kills of a table, in the order in which its stages come.
ROUND = (
    "prepare",
    "train transformer",
    "train transformer",
    "evaluate",
    "train landmark",
    "train landmark",
    "evaluate",
    "train transformer_xl",
    "train transformer_xl",
    "evaluate",
    "table",
)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: when it came, what it left, and how the next start went on."""

    table: int
    stage: str  # that the process was in when it was stopped
    seconds: float  # since its start
    records: int  # there were by then
    wrong_records: int
    locks_held: int
    temporary_files: int
    newest_checkpoint: int | None  # step, of the training that was killed
    went_on_at: int | None = None  # step at which the next start went on with it


@dataclass(frozen=True)
class Reference:
    """A table that nobody disturbed, and the seconds that it spent in each stage."""

    output: Path
    seconds: dict[str, float]

    @property
    def prepared_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.output.glob("data/*/*.bin"))


def undisturbed(folder: Path, overrides: Sequence[str] = ()) -> Reference:
    """Make the table in `folder`, and time its stages."""
    victim, seen, looked = Victim(folder, overrides), dict[str, float](), time.monotonic()
    while victim.process.poll() is None:
        before, looked = looked, time.monotonic()
        if (stage := victim.stage()) is not None:
            seen[stage] = seen.get(stage, 0.0) + looked - before
        time.sleep(0.02)
    victim.finish()
    return Reference(victim.output, seen)


def killed_table(
    folder: Path,
    stages: Sequence[str],
    reference: Reference,
    chance: random.Random,
    table: int = 1,
    overrides: Sequence[str] = (),
    processes: int = 1,
) -> Iterator[Kill | list[str]]:
    """Make the table in `folder`, killed once in each of `stages` at a moment drawn by `chance`, until it ends.

    processes: started at once to end it. Yields each kill when the next start has shown how it went on, then the
    differences from the reference.
    """
    last: Kill | None = None
    for number, stage in enumerate(stages):
        victim = Victim(folder, overrides, prepared_bytes=reference.prepared_bytes)
        if victim.wait_for(stage, stages[:number], chance.random()) and stage in ("evaluate", "table"):
            time.sleep(chance.uniform(0.0, reference.seconds.get(stage, 0.0)))
        found, alive = victim.kill()
        if last is not None:
            yield replace(last, went_on_at=_went_on_at(victim, last))
        last = _kill(table, found or "between stages", victim, reference) if alive else None
        if victim.process.returncode == 0:
            break
        if not alive:
            raise RuntimeError(f"run.py failed by itself:\n{victim.said()}")
    ending = [Victim(folder, overrides, log=f"end{number}") for number in range(processes)]
    for victim in ending:
        victim.finish()
    if last is not None:
        went_on = [step for each in ending if (step := _went_on_at(each, last)) is not None]
        yield replace(last, went_on_at=max(went_on, default=None))
    yield differences(ending[0].output, reference.output)


def _kill(table: int, stage: str, victim: Victim, reference: Reference) -> Kill:
    return Kill(
        table=table,
        stage=stage,
        seconds=round(time.monotonic() - victim.started, 2),
        records=len(list((victim.output / "records").rglob("*.json"))),
        wrong_records=len(wrong_records(victim.output, reference.output)),
        locks_held=len(locked(victim.output)),
        temporary_files=len([path for path in leftovers(victim.output) if not path.endswith(".ckpt")]),
        newest_checkpoint=_newest_checkpoint(victim.output, stage),
    )


def _newest_checkpoint(output: Path, stage: str) -> int | None:
    kind = stage.removeprefix("train ")
    steps = [int(path.stem.partition("-")[2]) for path in output.glob(f"runs/{kind}-*/checkpoints/step-*.ckpt")]
    return max(steps, default=0) if stage.startswith("train ") else None


def _went_on_at(victim: Victim, kill: Kill) -> int | None:
    """The step at which a process went on with the training that was killed before; 0: it began anew."""
    if not kill.stage.startswith("train "):
        return None
    kind = kill.stage.removeprefix("train ")
    said = re.search(rf"^{kind}-\S+: training for \d+ steps(?:, going on at step (\d+))?", victim.said(), re.MULTILINE)
    return None if said is None else int(said[1] or 0)


assert set(ROUND) == set(STAGES)
