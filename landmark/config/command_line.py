"""The command line of this process: what was typed, and the commands that it suggests."""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode


def launcher() -> str | None:
    """Name of the Hydra launcher that started this job in a process of its own (`submitit_slurm`); None without one."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    chosen = HydraConfig.get().runtime.choices["hydra/launcher"]
    return None if chosen == "basic" else chosen


def typed_words() -> list[str]:
    """The command line after `python`; in a job that a launcher started, the command line of this job alone."""
    if launcher() is not None:
        return ["run.py", *HydraConfig.get().overrides.task]
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


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
    program, *words = typed_words()
    kept = [word for word in words if override_key(word) not in left_out]
    return shlex.join(["python", program, *["-m"] * multirun, *kept, *more])


def override_key(word: str) -> str:
    """The key that an override sets: `experiment` of `+experiment=table1_pg19`."""
    return word.lstrip("+~").partition("=")[0]
