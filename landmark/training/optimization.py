"""AdamW's parameter groups and the learning rate of every step (paper, Section 4.1)."""

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from landmark.config.schema import TrainConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two AdamW groups: with weight decay the matrices of linear layers; without it embeddings, head and norms.

    The head is a linear layer that shares its weight with an embedding, or is outside every `nn.ModuleList`.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: dict[int, torch.Tensor] = {}
    for blocks in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for module in blocks.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
                decayed[id(module.weight)] = module.weight
    kept = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in decayed]
    return [
        {"params": [weight for weight in decayed.values() if weight.requires_grad], "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def learning_rate(step: int, train: "TrainConfig") -> float:
    """Learning rate of step 0 … steps−1: a cosine from `start_lr` up to `max_lr`, then one down to `final_lr`.

    The peak is at step `warmup`·steps − 1, which may be a fraction. Values equal those of PyTorch's OneCycleLR. As a
    function of the step, the learning rate needs no state in a checkpoint.
    """
    peak = train.warmup * train.steps - 1
    last = train.steps - 1
    if step < peak:
        return _cosine(train.start_lr, train.max_lr, step / peak)
    if step >= last:
        return train.final_lr if train.steps > 1 else train.max_lr
    return _cosine(train.max_lr, train.final_lr, (step - peak) / (last - peak))


def make_optimizer(model: nn.Module, train: "TrainConfig") -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, one fused kernel for all weights."""
    return torch.optim.AdamW(
        parameter_groups(model, train.weight_decay),
        lr=learning_rate(0, train),
        betas=(train.beta1, train.beta2),
        fused=True,
    )


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * fraction))
