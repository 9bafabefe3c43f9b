"""A training whose loss or weights are no longer finite: the step, its windows, and the last checkpoint before it."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from landmark.training.checkpointing import checkpoints
from landmark.utils.errors import Diverged, UserError
from landmark.utils.files import write_json

if TYPE_CHECKING:
    from landmark.data.datamodule import Windows

REPORT = "not_finite.json"  # in a run's folder
_SHOWN = 16  # windows named in the message

log = logging.getLogger(__name__)


class NotFinite(UserError):
    """`what` became `value` at a step, counted from 1."""

    def __init__(self, what: str, value: float, step: int) -> None:
        super().__init__(f"{what} became {value} at step {step}")
        self.what, self.value, self.step = what, value, step


def check_finite(what: str, values: list[float], first: int) -> None:
    """Raise NotFinite for the first value that is not finite; the values are of the steps from `first` on."""
    for step, value in enumerate(values, first):
        if not math.isfinite(value):
            raise NotFinite(what, value, step)


def diverged(error: NotFinite, windows: "Windows", run_dir: Path, seed: int) -> UserError:
    """Write a report with the windows of the step to the run's folder, and return the error for the user.

    A window is named by where it begins in the training text; −1 is a task (`data.tasks`, `data.passkeys`).

    Args:
        error: has the value and the step.
        windows: windows of the training.
        run_dir: the run's folder.
        seed: seed of the training.
    """
    starts = windows.starts(error.step - 1).tolist()
    before = next(iter(checkpoints(run_dir / "checkpoints")), None)
    report = {
        "what": error.what,
        "value": str(error.value),
        "step": error.step,
        "seed": seed,
        "windows": starts,
        "checkpoint": before and before.name,
    }
    path = run_dir / REPORT
    try:
        write_json(path, report)
    except OSError as full:
        log.warning("%s could not be written: %s", path, full)
    named = ", ".join(map(str, starts[:_SHOWN])) + (f", … ({len(starts)} in {path})" if len(starts) > _SHOWN else "")
    named += " (-1: a task)" if -1 in starts else ""
    kept = f"the checkpoint before it is {before}" if before else "no checkpoint was written before"
    return Diverged(
        f"diverged: {error}, on the windows {named}; {kept}: lower train.max_lr, or train with train.precision=32-true"
    )
