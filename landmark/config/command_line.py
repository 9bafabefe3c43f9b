"""The command line of this process: what was typed, and the commands that it suggests."""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from landmark.utils.locations import INSTALLED

PROGRAM = "landmark"  # `hydra.job.name` of what is no job of a sweep


def launcher() -> str | None:
    """Name of the Hydra launcher that started this job in a process of its own (`submitit_slurm`); None without one."""
    if not is_sweep():
        return None
    chosen = HydraConfig.get().runtime.choices["hydra/launcher"]
    return None if chosen == "basic" else chosen


def is_sweep() -> bool:
    """Whether this process was started with `-m`, or is one of its jobs."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def name_of_job() -> str | None:
    """In a job of a sweep: its values of what is swept, as `landmark.cli.whole_sweeps` names it; None elsewhere."""
    if not is_sweep():
        return None
    name = HydraConfig.get().job.name
    return None if name == PROGRAM else name


def number_of_job() -> int | None:
    """In a job of a sweep: its number, with which Hydra announces it; None elsewhere."""
    return HydraConfig.get().job.num if name_of_job() is not None else None


def own_folder() -> Path | None:
    """The folder of settings besides the package's that `--config-dir` names; None where there is none."""
    if not HydraConfig.initialized():
        return None
    sources = HydraConfig.get().runtime.config_sources
    return next((Path(each.path) for each in sources if each.provider == "command-line"), None)


def program() -> list[str]:
    """The words that start this program: `landmark`, `python -m landmark` or `python run.py`."""
    path = Path(sys.argv[0])
    if path.stem == "landmark":
        return ["landmark"]
    if path.name == "__main__.py" and path.parent.name == "landmark":
        return ["python", "-m", "landmark"]
    return ["landmark"] if INSTALLED else ["python", "run.py"]


def typed_words() -> list[str]:
    """The command line; in a job that a launcher started, the command line of this job alone."""
    words = sys.argv[1:] if launcher() is None else HydraConfig.get().overrides.task
    return [*program(), *words]


def launcher_words() -> list[str]:
    """The overrides that chose and configured the launcher of this job, to start another job in the same way."""
    if launcher() is None:
        return []
    return [word for word in HydraConfig.get().overrides.hydra if re.match(r"hydra[/.]launcher\b", word)]


def suggested_command(*more: str, without: Iterable[str] = (), multirun: bool = False) -> str:
    """The typed command line with other overrides, for a message.

    more: overrides to add. without: keys whose overrides are left out; `row`, `task` and the keys of `more` always are.
    """
    left_out = {"-m", "--multirun", "row", "task", *without, *(word.partition("=")[0] for word in more)}
    first = program()
    kept = [word for word in typed_words()[len(first) :] if override_key(word) not in left_out]
    return shlex.join([*first, *["-m"] * multirun, *kept, *more])


def override_key(word: str) -> str:
    """The key that an override sets: `experiment` of `+experiment=table1_pg19`."""
    return word.lstrip("+~").partition("=")[0]
