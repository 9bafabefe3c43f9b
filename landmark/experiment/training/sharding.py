"""Weights, gradients and optimizer states shared out over devices, layer by layer (`trainer=fsdp`, PyTorch's FSDP2).

Between two steps a device holds a share of each tensor, cut along its first dimension. Before a layer is computed its
whole weights are gathered, and after it they are freed. Checkpoints hold whole tensors, in the form of a training by
one process: a training can go on with any number of processes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from lightning import LightningModule, Trainer


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with checkpoints of whole tensors in files of `AtomicCheckpointIO`."""

    lightning_restore_optimizer = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights by name on the first device, nothing on the others. All devices must call this."""
        assert self.lightning_module is not None
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of a training by one process, on the first device alone. All devices must call this."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state = optimizer.state_dict()
        return {**state, "state": {number: self._whole(values) for number, values in state["state"].items()}}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        shares = {name: share(whole, own[name]) for name, whole in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(shares, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            shares = {
                number: {name: share(value, weights[number]) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": shares})

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors gathered one by one on the first device's CPU; the other devices drop each before the next."""
        gathered = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.is_global_zero:
                gathered[name] = whole.cpu() if isinstance(whole, Tensor) else whole
        return gathered


def share(whole: Any, like: Any) -> Any:
    """This device's share of a tensor, cut as `like` is; a number of the optimizer (such as its step) stays whole."""
    if not isinstance(like, DTensor) or not isinstance(whole, Tensor) or whole.shape != like.shape:
        return whole
    whole = whole.to(like.device, like.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def shard(module: "LightningModule", mesh: DeviceMesh) -> None:
    """Share out the weights of a module's model, which all devices hold before; its steps gather them in float32."""
    for layer in layers(module):
        fully_shard(layer, mesh=mesh)
    # A validation step has no backward pass, after which weights are freed.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for method in ("training_step", "validation_step"):
        register_fsdp_forward_method(module, method)


def layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers, which are the longest `nn.ModuleList`."""
    return list(max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len))


def is_sharded(module: nn.Module) -> bool:
    """Whether a device holds only a share of a module's weights."""
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def own_share(tensor: Tensor) -> Tensor:
    """The part of a tensor that this device holds: all of it, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(trainer: "Trainer") -> dict[str, Tensor] | None:
    """All weights by name, gathered on the first device; None if they are not sharded. All devices must call this."""
    if not isinstance(trainer.strategy, ShardedStrategy):
        return None
    state = trainer.strategy.lightning_module_state_dict()
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
