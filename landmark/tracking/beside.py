"""A logger of Lightning beside the CSV file and W&B: `logger=tensorboard`, or `logger.beside=tensorboard` with W&B."""

from pathlib import Path
from typing import TYPE_CHECKING

from landmark.config.schema import LoggerConfig
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


def loggers_beside(settings: LoggerConfig, folder: Path) -> "list[Logger]":
    """The loggers that the settings name; they write below a run's folder.

    Raises UserError where the package that one needs is not installed.
    """
    if settings.beside is None:
        return []
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return [TensorBoardLogger(folder, name="", version="tensorboard")]
    except ModuleNotFoundError as error:
        raise UserError(f"logger.beside={settings.beside}: is not installed, pip install tensorboard") from error
