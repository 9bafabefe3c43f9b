"""What gets the metrics of trainings besides the CSV file: `logger=tensorboard`, `mlflow` or `trackio`.

`logger.beside=mlflow` gives them to W&B too. A training that goes on continues its run there.
"""

import contextlib
import io
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from landmark.config.schema import Config
from landmark.utils.errors import UserError
from landmark.utils.nested import flat

_log = logging.getLogger(__name__)


def loggers_beside(config: Config, folder: Path) -> list[Logger]:
    """The loggers that the settings name. folder: of the run.

    Raises UserError where the package that one needs is not installed, or its service cannot be used.
    """
    name = config.logger.beside
    if name is None:
        return []
    try:
        return [{"tensorboard": _tensorboard, "mlflow": _mlflow, "trackio": _trackio}[name](config, folder)]
    except ModuleNotFoundError as error:
        raise UserError(f"logger.beside={name}: is not installed, pip install {name}") from error
    except Exception as error:  # of a service: an address that is none, a server that does not answer
        raise UserError(f"logger.beside={name}: {' '.join(str(error).split())}") from error


def _tensorboard(_: Config, folder: Path) -> Logger:
    return TensorBoardLogger(folder, name="", version="tensorboard")


def _mlflow(config: Config, folder: Path) -> Logger:
    """A run of the server that MLFLOW_TRACKING_URI names, or of a database in the output folder."""
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] (not in the test environment)

    client = MlflowClient(
        os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(config.output).resolve()}/mlflow.db"
    )
    known = client.get_experiment_by_name(config.logger.project)
    experiment = known.experiment_id if known else client.create_experiment(config.logger.project)
    found = client.search_runs([experiment], f"attributes.run_name = '{folder.name}'")
    run = (found[0] if found else client.create_run(experiment, run_name=folder.name)).info.run_id
    if not found:
        for key, value in flat(asdict(config)).items():
            client.log_param(run, key, value)

    def log(metrics: Mapping[str, float], step: int | None) -> None:
        for key, value in metrics.items():
            client.log_metric(run, key, value, step=step)

    return Beside(
        "mlflow", log, lambda status: client.set_terminated(run, "FINISHED" if status == "success" else "FAILED")
    )


def _trackio(config: Config, folder: Path) -> Logger:
    """A run in the folder that TRACKIO_DIR names, or in the output folder."""
    os.environ.setdefault("TRACKIO_DIR", str(Path(config.output).resolve() / "trackio"))
    import trackio  # pyright: ignore[reportMissingImports]

    with contextlib.redirect_stdout(io.StringIO()):
        run = trackio.init(
            config.logger.project,
            name=folder.name,
            config=asdict(config),
            resume="allow",
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def finish(_: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()

    return Beside("trackio", lambda metrics, step: run.log(dict(metrics), step), finish)


class Beside(Logger):
    """Hands metrics on. An error there is a warning: the training goes on, and its CSV file has them."""

    def __init__(
        self,
        service: str,
        log: Callable[[Mapping[str, float], int | None], None],
        finish: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._service, self._log, self._finish = service, log, finish

    @property
    def name(self) -> str:
        return self._service

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the configuration was logged when the run began."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._try(lambda: self._log(metrics, step))

    def finalize(self, status: str) -> None:
        self._try(lambda: self._finish(status))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            _log.warning("%s: %s; metrics.csv has the metrics", self._service, " ".join(str(error).split()))
