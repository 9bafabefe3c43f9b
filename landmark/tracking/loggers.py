"""Lightning's logger for W&B, which gets the metrics of a training besides its CSV file."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from landmark.utils.metrics_csv import metrics_so_far

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

    from landmark.tracking.wandb_run import TolerantRun


class WholeHistory(WandbLogger):
    """Logs a training to its W&B run, with each point once, also after a kill or a stop: metrics.csv's lines come
    first. Offline they replace earlier attempts' files; online W&B ignores steps that it has.
    """

    def __init__(self, run: "TolerantRun", folder: Path | None) -> None:
        """folder: of the run that is trained; None where no earlier line is logged."""
        super().__init__(experiment=cast("Run", run))
        self._folder = folder

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.begin(before=step)
        self.experiment.log({**metrics, "trainer/global_step": step}, step=step)

    def begin(self, before: int | None = None) -> None:
        """Log the earlier lines once; before: of steps less than this (None: all)."""
        folder, self._folder = self._folder, None
        for row in metrics_so_far(folder) if folder else ():
            if before is None or row["step"] < before:
                self.log_metrics({name: value for name, value in row.items() if name != "step"}, row["step"])


def discard_attempts(output: Path, identity: str) -> bool:
    """Delete what earlier attempts at a run left offline; False, and nothing, where W&B's server has points of it."""
    folders = list((output / "wandb").glob(f"offline-run-*-{identity}*"))  # of two in a second one ends in -1
    is_online = any((output / "wandb").glob(f"run-*-{identity}*"))
    if is_online or any(file for folder in folders for file in folder.glob("*.synced")):
        return False
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return True
