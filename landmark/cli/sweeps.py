"""Sweeps of `-m` that Hydra would accept and not carry out."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from landmark.utils.errors import UserError
from landmark.utils.locations import CONF


def check_sweeps(arguments: Sequence[str], conf: Path = CONF) -> None:
    """Raise UserError for two experiments at once, and for a glob that matches nothing.

    Hydra would ignore each experiment's own settings for the sweep, and launch no job without saying so. An argument
    that cannot be parsed is left for Hydra to report.
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


def _matches(pattern: Glob, folder: Path) -> bool:
    names = [file.stem for file in folder.glob("*.yaml")]
    return any(
        any(fnmatch.fnmatch(name, included) for included in pattern.include)
        and not any(fnmatch.fnmatch(name, excluded) for excluded in pattern.exclude)
        for name in names
    )
