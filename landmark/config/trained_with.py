"""The configuration that a run was trained with. Its folder keeps it, so that nobody has to type it again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from landmark.config.schema import Config, from_dict, to_dict
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json

LAUNCH = "launch.json"  # in a run's folder


def write_launch(folder: Path, config: Config, **more: Any) -> None:
    """Keep the configuration in a run's folder. more: what processes that train it together need besides."""
    write_json(
        folder / LAUNCH, {"config": to_dict(replace(config, rows={}, parts={}, compare={}, next_commands={})), **more}
    )


def read_launch(folder: Path) -> dict[str, Any]:
    """What `write_launch` wrote, `config` as a Config. Raises UserError where there is none, and as `from_dict`."""
    remedy = "delete it, training the run writes it anew"
    launch = read_json(folder / LAUNCH, {"config": dict}, remedy)
    try:
        config = from_dict(Config, launch["config"], str(folder / LAUNCH))
        OmegaConf.structured(config)  # checks the types of its values
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / LAUNCH}: config: {' '.join(str(error).split())}: {remedy}") from None
    return launch | {"config": config}


def trained_with(folder: Path) -> Config | None:
    """The configuration of a run's training; None where its folder does not say, as those of early versions."""
    return read_launch(folder)["config"] if (folder / LAUNCH).is_file() else None
