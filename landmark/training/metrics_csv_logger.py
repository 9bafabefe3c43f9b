"""The logger that writes metrics.csv, with a line for each measured step of a run, earlier attempts included."""

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from landmark.utils.files import name_in_errors, write_atomic
from landmark.utils.metrics_csv import read_metrics

COLUMNS = (
    *("step", "train/loss", "train/learning_rate", "train/gradient_norm", "train/tokens_per_second", "train/mfu"),
    *("train/seconds", "train/peak_memory_bytes", "validation/loss", "validation/perplexity"),
)


class MetricsCsvLogger(Logger):
    """Appends lines to metrics.csv, blank where not measured, and drops those after `resumed_step`."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        super().__init__()
        self.path = path
        rank_zero_only(self._drop_lines_after)(resumed_step)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing is written: the run's record holds the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        with name_in_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(_line({"step": step, **metrics}))

    @rank_zero_only
    def save(self) -> None:
        """Flush the lines to the disk, before a checkpoint of the same step is written."""
        with name_in_errors(self.path), open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def _drop_lines_after(self, step: int) -> None:
        kept = [row for row in read_metrics(self.path) if row["step"] <= step]
        write_atomic(self.path, ",".join(COLUMNS) + "\n" + "".join(map(_line, kept)))  # in the present columns


def _line(values: Mapping[str, Any]) -> str:
    """A line of the file, numbers with nine digits."""
    shown = {name: str(value) if name == "step" else f"{value:.9g}" for name, value in values.items()}
    return ",".join(shown.get(name, "") for name in COLUMNS) + "\n"
