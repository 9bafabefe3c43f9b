"""Kill tables again and again, and record the outcome."""

import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.survival.outcome import differences, leftovers, locked, wrong_records
from benchmarks.survival.victim import STAGES, Victim

# The stages in which a table is killed, in their order.
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
    """One SIGKILL: its moment, the state it left, and the step at which the next start resumed."""

    table: int
    stage: str  # of the process when it was stopped
    seconds: float  # since the start of the process
    records: int  # in the output folder
    wrong_records: int
    locks_held: int
    temporary_files: int
    newest_checkpoint: int | None  # its step, in the run that was killed
    resumed_at: int | None = None  # step at which the next start resumed that run; 0: from the beginning


@dataclass(frozen=True)
class Reference:
    """A table that was never killed, and the seconds of its stages."""

    output: Path
    seconds: dict[str, float]

    @property
    def prepared_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.output.glob("data/*/*.bin"))


def undisturbed(folder: Path, overrides: Sequence[str] = ()) -> Reference:
    """Make the table in `folder` and time its stages."""
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
    """Make the table in `folder`, and kill it once in each of some stages.

    Args:
        folder: gets the outputs and the log.
        stages: those in which it is killed.
        reference: the table that was never killed.
        chance: draws the moments.
        table: number of the table, for the kills.
        overrides: further overrides of run.py.
        processes: started together to finish the table.

    Yields each kill after the next start has resumed, then the differences from the reference.
    """
    last: Kill | None = None
    for number, stage in enumerate(stages):
        victim = Victim(folder, overrides, prepared_bytes=reference.prepared_bytes)
        if victim.wait_for(stage, stages[:number], chance.random()) and stage in ("evaluate", "table"):
            time.sleep(chance.uniform(0.0, reference.seconds.get(stage, 0.0)))
        found, alive = victim.kill()
        if last is not None:
            yield replace(last, resumed_at=_resumed_at(victim, last))
        last = _kill(table, found or "between stages", victim, reference) if alive else None
        if victim.process.returncode == 0:
            break
        if not alive:
            raise RuntimeError(f"run.py failed without a kill:\n{victim.text()}")
    ending = [Victim(folder, overrides, log=f"end{number}") for number in range(processes)]
    for victim in ending:
        victim.finish()
    if last is not None:
        went_on = [step for each in ending if (step := _resumed_at(each, last)) is not None]
        yield replace(last, resumed_at=max(went_on, default=None))
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


def _resumed_at(victim: Victim, kill: Kill) -> int | None:
    """The step at which a process resumed the training that was killed before; 0: from the beginning."""
    if not kill.stage.startswith("train "):
        return None
    kind = kill.stage.removeprefix("train ")
    said = re.search(rf"^{kind}-\S+: training for \d+ steps(?:, going on at step (\d+))?", victim.text(), re.MULTILINE)
    return None if said is None else int(said[1] or 0)


assert set(ROUND) == set(STAGES)
