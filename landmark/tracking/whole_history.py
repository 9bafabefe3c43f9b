"""The history of a training that goes on after a kill or a stop: each point once.

What was logged before lacks its last points, which W&B had not written yet, or has points after the checkpoint from
which the training goes on, which come again. metrics.csv has each step once.

- Offline, W&B starts a new file for each attempt: the files before are deleted, and all is logged again.
- Online, W&B says which step it has last, and gets the steps after it, from metrics.csv and from the training.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from landmark.utils.metrics_csv import metrics_so_far

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


def discard_attempts(output: Path, identity: str) -> bool:
    """Delete what earlier attempts at a run have left offline. Returns False, and deletes nothing, where W&B's server
    has points of the run.

    output: folder of the program. identity: W&B's id of the run.
    """
    folders = list((output / "wandb").glob(f"offline-run-*-{identity}"))
    is_online = any((output / "wandb").glob(f"run-*-{identity}"))
    if is_online or any(file for folder in folders for file in folder.glob("*.synced")):
        return False
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return True


class WholeHistory(WandbLogger):
    """Logs each step once: the lines of a run's metrics.csv that W&B lacks, then the new points.

    A point's step is the training's, so that W&B's last step says which points it has.

    Args:
        run: W&B's.
        folder: of the run that is trained.
        known: last step that W&B has, below 0 if none. None: unknown, then no earlier line is logged.
    """

    def __init__(self, run: "Run", folder: Path, known: int | None) -> None:
        super().__init__(experiment=run)
        self._folder, self._known = folder, -1 if known is None else known
        self._has_begun = known is None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.begin(before=step)
        if step is None or step > self._known:
            self.experiment.log({**metrics, "trainer/global_step": step}, step=step)

    def begin(self, before: int | None = None) -> None:
        """Log the earlier lines once; before: of steps less than this (None: all)."""
        if self._has_begun:
            return
        self._has_begun = True
        for row in metrics_so_far(self._folder):
            values: dict[str, Any] = {name: value for name, value in row.items() if name != "step"}
            if before is None or row["step"] < before:
                self.log_metrics(values, row["step"])
