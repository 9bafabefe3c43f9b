"""Lightning's logger for W&B, which gets the metrics of a training besides its CSV file."""

import shutil
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from landmark.utils.metrics_csv import metrics_so_far

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

    from landmark.experiment.tracking.wandb_run import TolerantRun


HEADER, BLOCK, FRAME = 7, 32768, 7  # bytes of W&B's files, which are logs of LevelDB
WHOLE, LAST = 1, 4  # kinds of a frame that end a record


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


def earlier_points(output: Path, identity: str) -> set[tuple[int, str]]:
    """Delete what earlier attempts at a run left offline. Where W&B's server has points of one, all stay, to be synced
    in any order: then the steps and metrics in their files.
    """
    folders = list((output / "wandb").glob(f"offline-run-*-{identity}*"))  # of two in a second one ends in -1
    online = list((output / "wandb").glob(f"run-*-{identity}*"))
    if not online and not any(file for folder in folders for file in folder.glob("*.sync*")):
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return set()
    points = set()
    for record in (
        record for folder in [*folders, *online] for path in folder.glob("*.wandb") for record in records(path)
    ):
        values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        if "trainer/global_step" in values:
            points |= {(int(values["trainer/global_step"]), name) for name in values}
    return points


def records(path: Path) -> Iterator[Any]:
    """The records in a file of W&B's, up to the one that is cut where its process was killed."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + FRAME <= len(data):
        if (left := BLOCK - at % BLOCK) < FRAME:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += FRAME + length
        whole += data[at - length : at]
        if kind in (WHOLE, LAST):
            try:
                record = Record.FromString(whole)
            except DecodeError:
                return
            if at <= len(data):
                yield record
            whole = b""
