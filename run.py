"""One table, one row, or one step of the way: `python run.py +experiment=NAME`, see README.md."""

import io
import os
import sys
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from landmark.cli import launchers
from landmark.cli import safety as targets
from landmark.cli.exit_codes import fail, fail_storage
from landmark.cli.main import main
from landmark.config import register
from landmark.config.command_line import check_sweeps, one_line
from landmark.utils.errors import UserError


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def launch(composed: DictConfig) -> None:
    main(composed)


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # launch() raises errors, not prints them
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too, a row is seen when it is done
    register()
    launchers.register()
    targets.guard()
    try:
        launchers.check(sys.argv[1:])
        check_sweeps(sys.argv[1:], Path(__file__).parent / "conf")
        launch()
    except (HydraException, OmegaConfBaseException, UserError) as error:
        fail(one_line(error))
    except OSError as error:  # Hydra makes the output folder
        fail_storage(error)
    except Exception as error:
        if not launchers.is_lost(error):
            raise
        fail(one_line(error))
