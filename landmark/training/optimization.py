"""The optimizers, their parameter groups and the learning rate of every step (paper, Section 4.1; Muon is ours)."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from landmark.training.sharding import share

if TYPE_CHECKING:
    from landmark.config.schema import TrainConfig

MUON_MOMENTUM = 0.95


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


def make_optimizer(model: nn.Module, train: "TrainConfig") -> torch.optim.Optimizer:
    """AdamW over `parameter_groups`, one fused kernel for all weights; or `MuonAndAdamW` over the same groups."""
    if train.optimizer == "muon":
        return MuonAndAdamW(model, train)
    return _adamw(parameter_groups(model, train.weight_decay), train)


def set_learning_rate(groups: list[dict[str, Any]], step: int, train: "TrainConfig") -> None:
    """Give every parameter group the learning rate of a step, times the group's `lr_scale` where it has one."""
    for group in groups:
        group["lr"] = learning_rate(step, train) * group.get("lr_scale", 1.0)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices of linear layers, AdamW for everything else, as one optimizer with one state.

    Muon (Jordan et al. 2024; `torch.optim.Muon`) steps along the nearest orthogonal matrix to the momentum of the
    gradient, as long as a step of AdamW (Liu et al. 2025, Section 2.2). Its learning rate is `train.muon_lr` where
    AdamW's is `train.max_lr`, and in proportion elsewhere.
    """

    def __init__(self, model: nn.Module, train: "TrainConfig"):
        decayed, rest = parameter_groups(model, train.weight_decay)
        rate = learning_rate(0, train)
        self._muon = torch.optim.Muon([decayed], lr=rate, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        self._adamw = _adamw([rest], train)
        self._muon.param_groups[0]["lr_scale"] = (train.muon_lr or train.max_lr) / train.max_lr
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step with both, after calling the closure. Returns what it returns."""
        loss = None if closure is None else closure()
        if isinstance(self.param_groups[0]["params"][0], DTensor):
            self._step_on_whole_matrices()
        else:
            self._muon.step()
        self._adamw.step()
        return loss

    @torch.no_grad()
    def _step_on_whole_matrices(self) -> None:
        """The step of one device, on matrices that are shared out (`trainer=fsdp`): gathered one after the other."""
        (group,) = self.param_groups[:1]
        settings = {name: group[name] for name in self._muon.defaults}
        for weight in (weight for weight in group["params"] if weight.grad is not None):
            state, matrix = self.state[weight], weight.detach().full_tensor()
            matrix.grad = weight.grad.full_tensor()
            alone = torch.optim.Muon([matrix], **settings)
            alone.state[matrix] |= {name: momentum.full_tensor() for name, momentum in state.items()}
            alone.step()
            weight.copy_(share(matrix, weight))
            state |= {name: share(momentum, weight) for name, momentum in alone.state[matrix].items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Both optimizers work on this one's groups and state, which are saved and loaded."""
        for part, groups in ((self._muon, self.param_groups[:1]), (self._adamw, self.param_groups[1:])):
            part.param_groups, part.state = groups, self.state


def _adamw(groups: list[dict], train: "TrainConfig") -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=learning_rate(0, train), betas=(train.beta1, train.beta2), fused=True)


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * fraction))
