"""Where to compute: devices, and how many processes a training takes."""

from landmark.config import Config
from landmark.experiment.team import for_team
from landmark.utils.errors import UserError
from landmark.utils.team import started_together


def device_count(config: Config) -> int:
    """Processes that a training takes: one per device; those that torchrun or srun started, where one of them did.

    Raises UserError where several machines are asked for and this process is alone.
    """
    if (team := started_together()) is not None:
        for_team(config, team)
        return team.size
    if (config.trainer.num_nodes or 1) > 1:
        raise UserError(
            f"trainer.num_nodes={config.trainer.num_nodes}: this process is alone; start the command on every machine, "
            "with srun or with torchrun --nnodes (docs/cluster.md)"
        )
    devices = config.trainer.devices
    if isinstance(devices, int):
        return devices
    if devices != "auto":
        return int(devices) if devices.isdigit() else len([part for part in devices.split(",") if part])
    if config.trainer.accelerator == "cpu" or config.trainer.strategy == "auto":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def evaluation_device(config: Config) -> str:
    """Device of an evaluation. Raises UserError where a GPU is asked for and there is none."""
    import torch

    if config.trainer.accelerator == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if config.trainer.accelerator in ("gpu", "cuda"):
        raise UserError(f"trainer={config.trainer.name}: no GPU was found, use trainer=cpu")
    return "cpu"
