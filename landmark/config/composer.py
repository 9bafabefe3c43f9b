"""Composing many configurations that choose the same groups, as an experiment's rows do."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.config.schema import GROUPS
from landmark.utils.source_tree import CONF


class Composer:
    """Composes as `compose` does, but calls it once for each choice of groups, and sets values on a copy."""

    def __init__(self, compose: Callable[[list[str]], DictConfig]) -> None:
        self._compose = compose
        self._made: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: list[str]) -> DictConfig:
        """Raises what `compose` raises."""
        parsed = parse(overrides)
        values = [_sets_a_value(override) for override in parsed]
        choices = tuple(line for line, is_value in zip(overrides, values) if not is_value)
        if choices not in self._made:
            self._made[choices] = self._compose(list(choices))
        config = copy.deepcopy(self._made[choices])
        try:
            for override in itertools.compress(parsed, values):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self._compose(overrides)  # raises it with more to say
        return config


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them."""
    return [_parse(override) for override in overrides]


@functools.cache
def _parse(override: str) -> Override:
    return OverridesParser.create().parse_overrides([override])[0]


def _sets_a_value(override: Override) -> bool:
    """Whether an override changes a value, and no choice of a group."""
    key = override.key_or_group
    is_group = override.package is not None or key in GROUPS or (CONF / key).is_dir()
    return override.type is OverrideType.CHANGE and not is_group
