"""Checkpoints of a training: written atomically with a SHA-256, read without pickle."""

import contextlib
import errno
import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.types import STEP_OUTPUT

from landmark.training.interruption import Interruption
from landmark.training.micro_batches import ends_step
from landmark.utils.differences import difference
from landmark.utils.errors import UserError
from landmark.utils.files import name_in_errors, sha256_file, sync_folder, write_atomic

log = logging.getLogger(__name__)

KEPT = 2  # checkpoints of a training; older ones are deleted

SETTINGS = "settings"  # key of the run's identity in a checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves so that a kill at any time leaves whole files, and loads only tensors and primitives.

    1. Write under a temporary name, compute the hash meanwhile, and flush to the disk.
    2. Read the file again and compare its hash.
    3. Write the hash beside it, then rename the file.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with name_in_errors(path), open(temporary, "wb") as file:
                hashed = _Hashed(file)
                try:
                    torch.save(checkpoint, cast(BinaryIO, hashed))
                except RuntimeError as error:  # torch raises it for a full disk
                    raise hashed.failed or error from None
                file.flush()
                os.fsync(file.fileno())
            if (digest := hashed.digest.hexdigest()) != sha256_file(temporary):
                raise OSError(errno.EIO, "the file read back differs from the data written", str(path))
            path.unlink(missing_ok=True)  # a damaged file of this step must not stand beside the new hash
            write_atomic(hash_path(path), f"{digest}  {path.name}\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)


class _Hashed:
    """A file for writing. digest: hash of all data given to `write`. failed: the error of a write that failed."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.failed = error
            raise

    def flush(self) -> None:
        self.file.flush()


class CheckpointCallback(Checkpoint):
    """Saves a checkpoint at fixed steps, at the last step, and after a signal.

    Lightning runs checkpoint callbacks after all others, so a checkpoint holds the measurements of its step.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        last_step: int,
        settings: dict[str, Any],
        interruption: Interruption,
    ) -> None:
        """
        Args:
            folder: folder of the checkpoints.
            every: optimizer steps between checkpoints.
            last_step: the step after which the training ends.
            settings: the run's identity, saved in each checkpoint.
            interruption: knows whether a signal came.
        """
        self.folder = folder
        self.every = every
        self.last_step = last_step
        self.settings = settings
        self.interruption = interruption

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.interruption.install_handlers()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        step = trainer.global_step
        stop = self.interruption.stop_requested(trainer)
        if step % self.every == 0 or step == self.last_step or stop:
            self._save(trainer, step)
        if stop:
            self.interruption.pass_on(checkpoint_path(self.folder, step))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS] = self.settings

    def _save(self, trainer: Trainer, step: int) -> None:
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(checkpoint_path(self.folder, step))
        if trainer.is_global_zero:
            for path in checkpoints(self.folder)[KEPT:]:
                path.unlink(missing_ok=True)
                hash_path(path).unlink(missing_ok=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.ckpt"


def hash_path(checkpoint: Path) -> Path:
    """The file beside a checkpoint that holds its SHA-256, as `sha256sum -c` reads it."""
    return checkpoint.with_name(f"{checkpoint.name}.sha256")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, that of the latest step first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def find_checkpoint(folder: Path, settings: dict[str, Any]) -> tuple[Path, int] | None:
    """The newest whole checkpoint and its step; None if there is none.

    Raises UserError if there are checkpoints and none is whole, or if the newest whole one has other settings.
    """
    found = checkpoints(folder)
    hashes = set(folder.glob("step-*.sha256")) - {hash_path(path) for path in found}
    for leftover in [*folder.glob(".*.tmp"), *hashes]:  # of a process killed while it wrote
        leftover.unlink(missing_ok=True)
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
    """Step and settings of a checkpoint. Raises exceptions of many kinds if it is not whole."""
    expected = hash_path(path)
    if not expected.exists():
        raise ValueError(f"{expected.name} is missing")
    if expected.read_text(encoding="ascii").split(" ")[0] != sha256_file(path):
        raise ValueError(f"its SHA-256 differs from {expected.name}")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return int(checkpoint["global_step"]), dict(checkpoint[SETTINGS])


def discard_checkpoints(run_dir: Path) -> None:
    """Delete the checkpoints of a finished run, after its record is written."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(Path(run_dir) / "checkpoints")
