"""Lightning's logger for W&B, which gets the metrics of a training besides its CSV file."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from landmark.utils.metrics_csv import metrics_so_far

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

    from landmark.experiment.tracking.wandb_run import TolerantRun


class WholeHistory(WandbLogger):
    """Logs a training to its W&B run, with each point once, also after a kill or a stop: metrics.csv's lines come
    first. Online W&B ignores steps that it has.
    """

    def __init__(self, run: "TolerantRun", folder: Path, points: Collection[tuple[int, str]] = ()) -> None:
        """folder: of the trained run. points: steps and metrics that other attempts, which stay, have logged."""
        super().__init__(experiment=cast("Run", run))
        self._folder: Path | None = folder
        self._points = frozenset(points)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.begin(before=step)
        new = {name: value for name, value in metrics.items() if (step, name) not in self._points}
        if new:
            self.experiment.log({**new, "trainer/global_step": step}, step=step)

    def begin(self, before: int | None = None) -> None:
        """Log the earlier lines once; before: of steps less than this (None: all)."""
        folder, self._folder = self._folder, None
        for row in metrics_so_far(folder) if folder else ():
            if before is None or row["step"] < before:
                self.log_metrics({name: value for name, value in row.items() if name != "step"}, row["step"])
