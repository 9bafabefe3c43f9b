"""Weights sharded over the devices (`trainer=fsdp`): a unit is a layer of the decoder."""

from typing import TYPE_CHECKING

from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning import Trainer


def strategy(name: str, model: nn.Module) -> str | Strategy:
    """The strategy of Lightning's trainer for the setting `trainer.strategy`."""
    if name != "fsdp":
        return name
    return FSDPStrategy(auto_wrap_policy=layer_types(model), state_dict_type="full")


def layer_types(model: nn.Module) -> set[type[nn.Module]]:
    """Classes of the decoder's layers: those in the longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {type(layer) for layer in max(lists, key=len)}


def gathered(trainer: "Trainer") -> dict[str, Tensor] | None:
    """Sharded weights of the trained model by name, gathered on the first device; None where nothing is sharded.

    Must be called on all devices.
    """
    if not isinstance(trainer.strategy, FSDPStrategy):
        return None
    state = trainer.strategy.lightning_module_state_dict()
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
