"""The command line: refuse what Hydra would take and not do, say its errors in one line, repeat what was typed."""

import difflib
import fnmatch
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from hydra.types import RunMode

from landmark.config import Config
from landmark.utils.errors import UserError

_NOISE = ("Config search path:", "provider=", "See https://", "object_type=", "full_key:", "reference_type=")


def launcher() -> str | None:
    """What started this job in a process of its own, as `submitit_slurm`; None where nothing did."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    chosen = HydraConfig.get().runtime.choices["hydra/launcher"]
    return None if chosen == "basic" else chosen


def typed() -> list[str]:
    """The command line after `python`; of a job that a launcher started, the one that does this job alone."""
    if launcher() is not None:
        return ["run.py", *HydraConfig.get().overrides.task]
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def launching() -> list[str]:
    """What chose and set up the launcher that started this job, to start another in the same way."""
    if launcher() is None:
        return []
    return [word for word in HydraConfig.get().overrides.hydra if re.match(r"hydra[/.]launcher\b", word)]


def check_sweeps(arguments: Sequence[str], conf: Path) -> None:
    """Raise UserError for two experiments at once, and for a glob that matches nothing.

    Hydra would ignore each experiment's own settings for the sweep, and launch no job without a word.
    What cannot be parsed is left for Hydra to report.
    """
    parser = OverridesParser.create()
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        try:
            override = parser.parse_override(argument)
        except HydraException:
            continue
        if not override.is_sweep_override():
            continue
        if override.key_or_group == "experiment":
            raise UserError(f"{argument}: one experiment at a time, start each on its own")
        value = override.value()
        if isinstance(value, Glob) and not _matches(value, conf / override.key_or_group):
            raise UserError(f"{argument}: matches nothing in conf/{override.key_or_group}")


def one_line(error: BaseException) -> str:
    """What an error of Hydra or OmegaConf says, in one line, without search paths, a near miss named."""
    parts = []
    for source in (error, error.__cause__):
        for line in str(source or "").splitlines():
            text = " ".join(line.split())
            if text and not text.startswith(_NOISE) and text not in parts:
                parts.append(text)
    text = re.sub(r":; ", ": ", "; ".join(parts))
    text = re.sub(r"(Available options in '[^']*': )(.*)", lambda m: m[1] + m[2].replace("; ", ", "), text)
    missing = re.search(r"Key '(\w+)' not in '(\w+)'", text)
    if missing and (near := difflib.get_close_matches(missing[1], _names(Config).get(missing[2], []), 1)):
        text += f"; did you mean '{near[0]}'?"
    return text


def _matches(pattern: Glob, folder: Path) -> bool:
    names = [file.stem for file in folder.glob("*.yaml")]
    return any(
        any(fnmatch.fnmatch(name, included) for included in pattern.include)
        and not any(fnmatch.fnmatch(name, excluded) for excluded in pattern.exclude)
        for name in names
    )


def _names(schema: type) -> dict[str, list[str]]:
    """Field names of every group of the schema, by the name of its class."""
    found = {schema.__name__: [item.name for item in fields(schema)]}
    for hint in get_type_hints(schema).values():
        if is_dataclass(hint) and isinstance(hint, type):
            found |= _names(hint)
    return found
