"""Weights shared out among the devices (`trainer=fsdp`): a unit is a layer of the decoder."""

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import Tensor, nn

if TYPE_CHECKING:
    import lightning


def strategy(name: str, model: nn.Module) -> str | Strategy:
    """What Lightning's trainer takes for `trainer.strategy`."""
    if name != "fsdp":
        return name
    return FSDPStrategy(auto_wrap_policy=layer_types(model), state_dict_type="full")


def layer_types(model: nn.Module) -> set[type[nn.Module]]:
    """Classes of the decoder's layers: those in the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {type(layer) for layer in max(lists, key=len)}


def gathered(trainer: "lightning.Trainer") -> dict[str, Tensor] | None:
    """Weights of the trained model by their names in it, on the first device, where they are shared out; None where
    every device has them all. To be called on all devices."""
    if not isinstance(trainer.strategy, FSDPStrategy):
        return None
    state = trainer.strategy.lightning_module_state_dict()
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
