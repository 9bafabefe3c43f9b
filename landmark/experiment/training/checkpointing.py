"""Checkpoints of a training, written atomically and read without pickle, and the signals that end it after one."""

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.types import STEP_OUTPUT

from landmark.experiment.training.lightning_module import ends_step
from landmark.utils.checkpoints import checkpoint_path, checkpoints, hash_path
from landmark.utils.errors import Stopped, UserError
from landmark.utils.files import atomic_file, open_written, write_atomic
from landmark.utils.setting import difference

log = logging.getLogger(__name__)

KEPT = 2  # checkpoints of a training; older ones are deleted

SETTINGS = "settings"  # key of the run's identity in a checkpoint

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
INTERRUPTED = b"\nCtrl-C: finishing the step, then a checkpoint is written; press it again to stop at once\n"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves so that a kill leaves whole files, and loads only tensors and primitives. A hash is computed while a file
    is written, compared with what is read back, and stands beside it before it gets its name.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        with atomic_file(path) as file:
            hashed = _Hashed(file)
            try:
                torch.save(checkpoint, cast(BinaryIO, hashed))
            except RuntimeError as error:  # torch raises it for a full disk
                raise hashed.failed or error from None
            file.flush()
            os.fsync(file.fileno())  # before anything of an earlier file of this step goes
            file.seek(0)
            if (digest := hashed.digest.hexdigest()) != hashlib.file_digest(file, "sha256").hexdigest():
                raise OSError(errno.EIO, "the file read back differs from the data written", str(path))
            path.unlink(missing_ok=True)  # a damaged file of this step must not stand beside the new hash
            write_atomic(hash_path(path), f"{digest}  {path.name}\n")

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


class Interruption:
    """Handles the signals with which a cluster ends a job, and Ctrl-C, during a training; a context.

    After a signal the step is finished and a checkpoint written. Then the handler from before is called, such as a
    launcher's, which requeues the job; without one the training ends with `Stopped`.
    """

    def __init__(self, every: int) -> None:
        """every: steps between checks of several devices, which communicate."""
        self.every = every
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._came: signal.Signals | None = None

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            self._before = {each: signal.getsignal(each) for each in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def install_handlers(self) -> None:
        """Replace Lightning's, which communicate in the middle of a step. What was ignored is ignored again."""
        for each, before in self._before.items():
            signal.signal(each, signal.SIG_IGN if before == signal.SIG_IGN else self._note)

    def stop_requested(self, trainer: Trainer) -> bool:
        """Whether to stop after this step, because a signal came to some device."""
        stop = self._came is not None
        if trainer.world_size == 1:
            return stop
        if trainer.global_step % self.every:
            return False
        return trainer.strategy.reduce_boolean_decision(stop, all=False)

    def pass_on(self, checkpoint: Path) -> None:
        """Call the earlier handler of the signal. Raises Stopped if there is none but Python's own."""
        came, self._came = self._came or signal.SIGTERM, None
        before = self._before.get(came)
        if callable(before) and before is not signal.default_int_handler:
            log.warning("%s: %s is written", came.name, checkpoint)
            before(came, None)
        else:
            raise Stopped(came, checkpoint)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            if self._came == signal.SIGINT:
                raise KeyboardInterrupt
            os.write(2, INTERRUPTED)  # a handler must not use a stream that it may have interrupted
        self._came = signal.Signals(signum)


class TimeLimit(Timer):
    """Lightning's `max_time` of one start, at the end of a step: a training that goes on has all of it again."""

    is_over = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if ends_step(trainer, batch_idx):
            before = trainer.should_stop
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self.is_over = trainer.should_stop and not before

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class CheckpointCallback(Checkpoint):
    """Saves a checkpoint at fixed steps, at the last step and after a signal, after all callbacks."""

    def __init__(
        self,
        folder: Path,
        every: int,
        last_step: int,
        settings: dict[str, Any],
        interruption: Interruption,
        limit: "TimeLimit | None" = None,
    ) -> None:
        """every: optimizer steps between checkpoints. settings: the run's identity, saved in each checkpoint. limit:
        of the time, after which the training ends with Stopped.
        """
        self.limit = limit
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
        if step % self.every == 0 or step == self.last_step or stop or trainer.should_stop:
            self._save(trainer, step)
        if stop:
            self.interruption.pass_on(checkpoint_path(self.folder, step))
        if self.limit is not None and self.limit.is_over and step < self.last_step:
            raise Stopped(None, checkpoint_path(self.folder, step))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS] = self.settings

    def _save(self, trainer: Trainer, step: int) -> None:
        trainer.save_checkpoint(checkpoint_path(self.folder, step))
        if trainer.is_global_zero:
            for path in checkpoints(self.folder)[KEPT:]:
                path.unlink(missing_ok=True)
                hash_path(path).unlink(missing_ok=True)


def find_checkpoint(folder: Path, settings: dict[str, Any]) -> tuple[Path, int] | None:
    """The newest whole checkpoint and its step; None if there is none. Raises UserError if none is whole or fits."""
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
    with open_written(expected) as file:
        sha256 = file.read().decode("ascii").split(" ")[0]
    open_written(path, sha256=sha256, named=expected.name).close()
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return int(checkpoint["global_step"]), dict(checkpoint[SETTINGS])


def discard_checkpoints(run_dir: Path) -> None:
    """Delete the checkpoints of a finished run, after its record is written."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(Path(run_dir) / "checkpoints")
