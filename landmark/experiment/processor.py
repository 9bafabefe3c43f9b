"""How torch uses a CPU: its threads, and the library that multiplies its float32 matrices."""

import functools
import os

from landmark.config import Config
from landmark.utils.hardware import cores
from landmark.utils.team import started_together

AS_EXACT = 2.0  # times the error of PyTorch's usual library


def set_up_processor(config: Config) -> None:
    """Set torch's threads to `trainer.threads`, and on a CPU let oneDNN multiply float32 matrices where it is as exact.

    By default torch takes as many threads as OMP_NUM_THREADS or the cores; processes that train together share the
    cores of their machine.
    """
    import torch

    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    elif (team := started_together()) is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // team.local_size))
    if config.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        torch.set_float32_matmul_precision("medium" if _is_onednn_exact() else "highest")


@functools.cache
def _is_onednn_exact() -> bool:
    """Whether "medium" precision, with which PyTorch multiplies by oneDNN, rounds no more than float32 does.

    Some processors then compute the same float32 products twice as fast. Others, with instructions for bfloat16, round.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, *shape, generator=generator) for shape in ((102, 128), (128, 510)))
    errors = {}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        errors[precision] = float(((a @ b).double() - a.double() @ b.double()).abs().max())
    return errors["medium"] <= AS_EXACT * errors["highest"]
