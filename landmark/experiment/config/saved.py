"""A configuration in files: the values other than the defaults, which therefore never change."""

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from landmark.experiment.config.schema import Config, to_config
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.setting import flat

RUN, LAUNCH = "run.json", "launch.json"  # in a run's folder: the settings that are its identity, and all settings


def to_saved(config: Config) -> dict[str, Any]:
    """The values other than the defaults, JSON-ready, without what is of an experiment and its table."""
    return _changed(replace(config, rows={}, parts={}, panels={}, compare={}), Config())


def from_saved(values: dict[str, Any], where: str = "start_run", remedy: str = "") -> Config:
    """The inverse of `to_saved`. where, remedy: ends of the message. Raises UserError for an unknown or wrong value."""
    try:
        saved = OmegaConf.merge(OmegaConf.structured(Config), _as_text(values))
        return to_config(cast(DictConfig, saved), is_command=False)
    except ConfigKeyError as error:
        key = str(error.full_key)
        removed = "there is no such setting; experiments/tried.md has those that were removed"
        raise UserError(f"{where}: {key}={flat(values).get(key)}: {removed}") from None
    except (OmegaConfBaseException, UserError) as error:
        raise UserError(f"{where}: {str(error).splitlines()[0]}{remedy}") from None


def _as_text(value: Any) -> Any:
    """A value whose texts are no references (`${…}`): a file that was downloaded could ask for what no setting says."""
    if isinstance(value, dict):
        return {key: _as_text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def write_launch(folder: Path, config: Config) -> None:
    """Keep the configuration of a training in the run's folder, so that nobody has to type it again."""
    write_json(folder / LAUNCH, {"config": to_saved(config)})


def trained_with(folder: Path) -> Config | None:
    """The configuration of a run's training; None where its folder does not say. Raises UserError as `from_saved`."""
    if not (folder / LAUNCH).is_file():
        return None
    remedy = "delete it, training the run writes it anew"
    values = read_json(folder / LAUNCH, {"config": dict}, remedy)["config"]
    return from_saved(values, str(folder / LAUNCH), f": {remedy}")


def _changed(values: Any, usual: Any) -> dict[str, Any]:
    found = {}
    for item in fields(values):
        value, default = getattr(values, item.name), getattr(usual, item.name)
        if is_dataclass(value):
            value, default = _changed(value, default), {}
        if value != default:
            found[item.name] = value
    return found
