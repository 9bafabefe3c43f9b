"""Checkpoints of a training: written atomically, read without pickle, the newest readable one resumed."""

import contextlib
import logging
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.types import STEP_OUTPUT

from landmark.errors import UserError
from landmark.lab.files import sync_folder
from landmark.lab.identity import difference

log = logging.getLogger(__name__)

SETTINGS = "settings"  # key of the checkpoint under which the run's settings stand


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes under a temporary name, then renames; loads tensors and primitives only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)


class Checkpoints(Checkpoint):
    """Saves every `every` optimizer steps and at the last one, and keeps the newest two.

    Lightning runs checkpoint callbacks after all others, so what was measured at this step is part of it.
    """

    def __init__(self, folder: Path, every: int, last_step: int, settings: dict[str, Any], keep: int = 2) -> None:
        self.folder = folder
        self.every = every
        self.last_step = last_step
        self.settings = settings
        self.keep = keep

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        if step % self.every and step != self.last_step:
            return
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(checkpoint_path(self.folder, step))
        if trainer.is_global_zero:
            for path in checkpoints(self.folder)[self.keep :]:
                path.unlink(missing_ok=True)

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[SETTINGS] = self.settings


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.ckpt"


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a folder, the newest first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def find_checkpoint(folder: Path, settings: dict[str, Any]) -> tuple[Path, int] | None:
    """The newest readable checkpoint and its step; None where there is none yet.

    Raises UserError if every checkpoint is cut short or altered, or if it belongs to other settings.
    """
    for leftover in folder.glob(".*.tmp"):  # of a process killed while it wrote
        leftover.unlink(missing_ok=True)
    found = checkpoints(folder)
    for path in found:
        try:
            step, saved = _open(path)
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning("%s is cut short or altered, trying an older checkpoint (%s)", path, reason)
            continue
        if differing := difference(settings, saved):
            raise UserError(
                f"{path} is a checkpoint of another configuration ({differing}): "
                f"restore these settings, or delete {folder} to train anew"
            )
        return path, step
    if found:
        raise UserError(f"{found[0]} is cut short or altered, and no older checkpoint is whole: delete {folder}")
    return None


def _open(path: Path) -> tuple[int, dict[str, Any]]:
    """Step and settings of a checkpoint. Raises whatever its reader does if it is not whole."""
    with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return int(checkpoint["global_step"]), dict(checkpoint[SETTINGS])


def discard_checkpoints(run_dir: Path) -> None:
    """Remove a finished run's checkpoints; call it once the run's record is written."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(Path(run_dir) / "checkpoints")
