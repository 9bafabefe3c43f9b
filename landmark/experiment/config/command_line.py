"""The command line of this process: what Hydra knows of it, and the commands that it suggests."""

import os
import re
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from landmark.utils.source_tree import INSTALLED

PROGRAM = "landmark"
OWN_SETTINGS = "command-line"  # Hydra's name for the folder of `--config-dir`


@dataclass(frozen=True)
class StartedJob:
    """The job that Hydra has begun. words: its overrides. launcher: of a sweep's job, if it is not Hydra's basic one
    (`submitit_slurm`), with its own overrides in launcher_words. number: of a sweep's job. values: of a sweep's job the
    keys that are swept, with its values.
    """

    words: list[str] = field(default_factory=list)
    config_name: str = "config"
    config_dir: Path | None = None
    launcher: str | None = None
    launcher_words: list[str] = field(default_factory=list)
    number: int | None = None
    values: dict[str, str] = field(default_factory=dict)


def started() -> StartedJob:
    """The job of this process; an empty one outside of Hydra."""
    if not HydraConfig.initialized():
        return StartedJob()
    hydra = HydraConfig.get()
    words = as_typed(hydra.overrides.task)
    own = [Path(source.path) for source in hydra.runtime.config_sources if source.provider == OWN_SETTINGS]
    job = StartedJob(words, hydra.job.config_name or "config", own[0] if own else None)
    if OmegaConf.is_missing(hydra.job, "num"):
        return job
    launcher, fixed = hydra.runtime.choices.get("hydra/launcher"), hydra.job.config.override_dirname.exclude_keys
    parsed = OverridesParser.create().parse_overrides(words)
    swept = [each for each in parsed if each.key_or_group not in fixed]
    return replace(
        job,
        launcher=None if launcher == "basic" else launcher,
        launcher_words=[
            word for word in as_typed(hydra.overrides.hydra) if re.match(r"[+~]*hydra[/.]launcher\b", word)
        ],
        number=hydra.job.num,
        values={each.get_key_element(): (each.input_line or "").partition("=")[2] for each in swept},
    )


def is_sweep_agent() -> bool:
    """Whether the agent of a W&B sweep started this process; everything is then logged to the run of the agent."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def as_typed(overrides: Any) -> list[str]:
    """Overrides in Hydra's settings, their references (`${…}`) as they stand."""
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


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
    job = started()
    return [*program(), *(sys.argv[1:] if job.launcher is None else job.words)]


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
