"""The command line of this process: what was typed, and the commands that it suggests."""

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from landmark.utils.source_tree import INSTALLED

PROGRAM = "landmark"


@dataclass(frozen=True)
class StartedJob:
    """What this process carries out: a typed command, or one job of a sweep. words: its overrides. launcher: which
    started it (`submitit_slurm`), by the overrides launcher_words. name, number: of a job, its values of what is swept,
    and its place.
    """

    words: list[str] = field(default_factory=list)
    config_dir: Path | None = None
    launcher: str | None = None
    launcher_words: list[str] = field(default_factory=list)
    name: str | None = None
    number: int | None = None


_started = StartedJob()


def begin(job: StartedJob) -> None:
    """Note what this process carries out from here on."""
    global _started
    _started = job


def started() -> StartedJob:
    """The job that this process has begun."""
    return _started


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
    return [*program(), *(sys.argv[1:] if _started.launcher is None else _started.words)]


def suggested_command(*more: str, multirun: bool = False) -> str:
    """The typed command line with `more` overrides, without `row`, `task` and the keys of `more`."""
    left_out = {"-m", "--multirun", "row", "task", *map(override_key, more)}
    first = program()
    kept = [word for word in typed_words()[len(first) :] if override_key(word) not in left_out]
    return shlex.join([*first, *["-m"] * multirun, *kept, *more])


def override_key(word: str) -> str:
    """The key that an override sets: `experiment` of `+experiment=table1_pg19`."""
    return word.lstrip("+~").partition("=")[0]


def is_of_hydra(key: str) -> bool:
    """Whether a key is one of Hydra's own: `hydra/launcher`, `hydra.sweeper.seed`."""
    return re.match(r"hydra\b", key) is not None
