"""Processes that torchrun or srun started together, one per device, on one machine or several."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """rank: number of this process. size: processes on all machines. local_size: those on this machine."""

    rank: int
    size: int
    local_size: int

    @property
    def machines(self) -> int:
        return self.size // self.local_size


def started_together() -> Team | None:
    """The processes of which this is one, from the variables that torchrun and srun set; None if it is alone."""
    names = {
        "TORCHELASTIC_RUN_ID": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        "SLURM_STEP_ID": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),  # srun's, not those of sbatch
    }
    for launcher, (rank, size, local_size) in names.items():
        if launcher in os.environ and int(os.environ.get(size, "1")) > 1:
            local = os.environ.get(local_size, os.environ[size])
            return Team(int(os.environ[rank]), int(os.environ[size]), int(local))
    return None


def first_says(ask: Callable[[], T], group: Any = None) -> T:
    """What the first process answers, in all that have joined, which must all call this; others ask themselves."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return ask()
    answers = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answers, group=group)
    return cast(T, answers[0])
