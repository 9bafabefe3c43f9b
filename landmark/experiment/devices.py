"""Where to compute: devices, and how many processes a training takes."""

from landmark.config import Config
from landmark.utils.errors import UserError


def device_count(config: Config) -> int:
    """Processes that a training takes: one per device."""
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


def set_up_processor(config: Config) -> None:
    """Give torch the threads of `trainer.threads`, where they are set, and the float32 products of `trainer.matmul`.

    Where a GPU computes, its products stay as they are.
    """
    import torch

    from landmark.utils.matmul import set_matmul

    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    if config.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        set_matmul(config.trainer.matmul)
