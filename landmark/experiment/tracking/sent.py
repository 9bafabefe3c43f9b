"""What W&B has been given of an output folder: rows and tables, each once, also after a kill or from another logger."""

from pathlib import Path

from landmark.experiment.config import Config
from landmark.experiment.tracking import wandb_files
from landmark.experiment.tracking.wandb_run import place
from landmark.utils.files import write_atomic


def is_sent(config: Config, identity: str, content: str, *, is_new: bool) -> bool:
    """Whether W&B has a row or a table, or its local files do. content: a hash of it. is_new: made by this process."""
    file = _note(config, identity)
    if file.is_file() and file.read_text(encoding="utf-8") == content:
        return True
    if is_new or file.is_file() or not wandb_files.is_whole(place(config), identity):
        return False
    note_sent(config, identity, content)  # by a version of this program that left no note
    return True


def note_sent(config: Config, identity: str, content: str) -> None:
    """Note it for `is_sent`, beside W&B's folder, which may be deleted."""
    write_atomic(_note(config, identity), content)


def _note(config: Config, identity: str) -> Path:
    return Path(config.output) / "tracked" / identity
