"""The optimizers, their parameter groups and the learning rate of every step (paper, Section 4.1; Muon is ours)."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from landmark.experiment.training.sharding import share
from landmark.utils.constants import BETAS

if TYPE_CHECKING:
    from landmark.experiment.config.schema import TrainConfig

MUON_MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
TOGETHER, SMALL = ("cuda",), 1 << 22  # devices on which Muon's matrices of at most so many numbers go together
MUON_A, MUON_B, MUON_C = 3.4445, -4.7750, 2.0315  # of the quintic a·x + b·x³ + c·x⁵


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two AdamW groups: with weight decay the matrices of linear layers; without it embeddings, norms and the head,
    which shares its weight with an embedding, or is outside every `nn.ModuleList`.
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
    """Learning rate of step 0 … steps−1: a cosine from `start_lr` up to `max_lr` at step `warmup`·steps − 1, which may
    be a fraction, then one down to `final_lr`, as PyTorch's OneCycleLR.
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
    if train.muon_lr is not None:
        return MuonAndAdamW(model, train)
    return _adamw(parameter_groups(model, train.weight_decay), train)


def set_learning_rate(groups: list[dict[str, Any]], step: int, train: "TrainConfig") -> None:
    """Give every parameter group the learning rate of a step, times the group's `lr_scale` where it has one."""
    for group in groups:
        group["lr"] = learning_rate(step, train) * group.get("lr_scale", 1.0)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices of linear layers, AdamW for everything else, as one optimizer with one state.

    Muon (Jordan et al. 2024) steps along the nearest orthogonal matrix to the momentum of the gradient, as long as a
    step of AdamW (Liu et al. 2025, Section 2.2). Its learning rate is `train.muon_lr` where AdamW's is `train.max_lr`,
    and in proportion elsewhere. A step is that of `torch.optim.Muon`, except that on a CPU it is taken in float32:
    without instructions for half precision PyTorch's products of it there made a whole training five times as long.
    """

    def __init__(self, model: nn.Module, train: "TrainConfig"):
        matrices, rest = parameter_groups(model, train.weight_decay)
        matrices |= {"lr": learning_rate(0, train), "lr_scale": (train.muon_lr or train.max_lr) / train.max_lr}
        self._adamw = _adamw([rest], train)
        super().__init__([matrices, *self._adamw.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step with both, after calling the closure. Returns what it returns."""
        loss = None if closure is None else closure()
        self._step_of_muon(self.param_groups[0])
        self._adamw.step()
        return loss

    @torch.no_grad()
    def _step_of_muon(self, group: dict[str, Any]) -> None:
        """Weights that are shared out over devices (`trainer=fsdp`) are gathered one after the other."""
        for weights in _together([weight for weight in group["params"] if weight.grad is not None]):
            directions = [self._direction(weight) for weight in weights]
            if isinstance(directions[0], DTensor):
                directions = [share(orthogonal(directions[0].full_tensor()), weights[0])]
            elif len(weights) == 1:
                directions = [orthogonal(directions[0])]
            else:
                directions = orthogonal(torch.stack(directions))
            for weight, direction in zip(weights, directions, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(direction, alpha=-group["lr"] * (0.2 * math.sqrt(max(weight.shape))))

    def _direction(self, weight: Tensor) -> Tensor:
        """The momentum of a weight's gradient, and half a step on (Nesterov)."""
        assert weight.grad is not None
        if (momentum := self.state[weight].get("momentum_buffer")) is None:
            momentum = self.state[weight]["momentum_buffer"] = torch.zeros_like(weight.grad)
        momentum.lerp_(weight.grad, 1 - MUON_MOMENTUM)
        return weight.grad.lerp(momentum, MUON_MOMENTUM)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """AdamW works on this optimizer's groups and state, which are saved and loaded."""
        self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state


def _together(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Matrices of one step, in groups whose products are computed together: on a GPU small ones of the same shape."""
    groups: dict[Any, list[Tensor]] = {}
    for weight in weights:
        is_small = weight.device.type in TOGETHER and not isinstance(weight, DTensor) and weight.numel() <= SMALL
        groups.setdefault((weight.shape, weight.dtype) if is_small else id(weight), []).append(weight)
    return list(groups.values())


def orthogonal(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """About U·Vᵀ of matrices U·S·Vᵀ (…, m, n): five Newton–Schulz steps (Jordan's) leave singular values of about 0.7
    to 1.2. dtype: None: bfloat16 on a GPU, float32 on a CPU.
    """
    x = matrix.to(dtype or (torch.bfloat16 if matrix.is_cuda else torch.float32))
    if is_tall := matrix.shape[-2] > matrix.shape[-1]:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    added = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = added(x, added(gram, gram, gram, beta=MUON_B, alpha=MUON_C), x, beta=MUON_A)
    return x.mT if is_tall else x


def _adamw(groups: list[dict], train: "TrainConfig") -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=learning_rate(0, train), betas=BETAS, fused=True)


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * fraction))
