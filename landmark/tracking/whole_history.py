"""The history of a training that goes on offline, after a kill or a stop: one file with each point once.

W&B starts a new file for each attempt. The one before lacks its last points, which W&B had not written yet, or has
points after the checkpoint from which the training goes on, and so has the new one. metrics.csv has each step once.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import WandbLogger

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
    """Logs the earlier lines of a run's metrics.csv before its first point.

    run: W&B's. folder: of the run that is trained.
    """

    def __init__(self, run: "Run", folder: Path) -> None:
        super().__init__(experiment=run)
        self._folder = folder
        self._has_begun = False

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.begin(before=step)
        super().log_metrics(metrics, step)

    def begin(self, before: int | None = None) -> None:
        """Log the earlier lines once; before: of steps less than this (None: all)."""
        if self._has_begun:
            return
        self._has_begun = True
        for row in metrics_so_far(self._folder):
            values: dict[str, Any] = {name: value for name, value in row.items() if name != "step"}
            if before is None or row["step"] < before:
                super().log_metrics(values, row["step"])
