"""Values that no setting can have: numbers that are none, texts that cannot be written, counts beyond any machine."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from landmark.config.schema import Config
from landmark.utils.errors import UserError

MOST_THREADS = 1024  # torch ends in a segmentation fault where the system has no room for more
_LARGEST = 2**63 - 1  # of a whole number, which torch and NumPy keep in 64 bits


def check_ranges(config: Config) -> None:
    """Raise UserError, naming the key, for a value that would end in an error far from here."""
    for key, value in _values(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value}: must be a finite number")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise UserError(f"{key}={value}: must be a number of at most 64 bits")
        if isinstance(value, str) and ("\0" in value or not _is_text(value)):
            raise UserError(f"{key}={value!a}: must be text in UTF-8")
    train, trainer = config.train, config.trainer
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(train, key) < 1:
            raise UserError(f"train.{key}={getattr(train, key)}: must be at least 0 and less than 1")
    if train.weight_decay < 0:
        raise UserError(f"train.weight_decay={train.weight_decay}: must be at least 0")
    if config.model.rope_base <= 0:
        raise UserError(f"model.rope_base={config.model.rope_base}: must be above 0")
    for seed in config.seeds or []:
        if seed < 0:
            raise UserError(f"seeds={config.seeds}: must be at least 0")
    if trainer.threads is not None and trainer.threads > MOST_THREADS:
        raise UserError(f"trainer.threads={trainer.threads}: must be at most {MOST_THREADS}, null takes the cores")
    if not re.fullmatch(r"auto|[1-9]\d*|\d+(,\d+)+,?|\d+,", str(trainer.devices)):
        raise UserError(f"trainer.devices={trainer.devices}: must be auto, a number from 1 on, or numbers like 0,1")
    if config.output_file is not None and not config.output_file.endswith((".html", ".htm")):
        raise UserError(f"output_file={config.output_file}: is a page, name it *.html")


def _values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of a configuration, with its key."""
    if is_dataclass(value):
        for item in fields(value):
            yield from _values(getattr(value, item.name), f"{key}.{item.name}" if key else item.name)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _values(each, f"{key}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from _values(each, key)
    elif not isinstance(value, bool):
        yield key, value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
