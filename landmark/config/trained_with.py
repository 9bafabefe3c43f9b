"""The configuration that a run was trained with. Its folder keeps it, so that nobody has to type it again."""

from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from landmark.config.schema import Config, from_dict, to_dict
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json

LAUNCH = "launch.json"  # in a run's folder


def write_launch(folder: Path, config: Config) -> None:
    """Keep the configuration in a run's folder."""
    alone = replace(config, rows={}, parts={}, compare={}, next_commands={})
    write_json(folder / LAUNCH, {"config": to_dict(alone)})


def trained_with(folder: Path) -> Config | None:
    """The configuration of a run's training; None where its folder does not say. Raises UserError as `from_dict`."""
    if not (folder / LAUNCH).is_file():
        return None
    remedy = "delete it, training the run writes it anew"
    launch = read_json(folder / LAUNCH, {"config": dict}, remedy)
    try:
        config = from_dict(Config, launch["config"], str(folder / LAUNCH))
        OmegaConf.structured(config)  # checks the types of its values
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / LAUNCH}: config: {' '.join(str(error).split())}: {remedy}") from None
    return config
