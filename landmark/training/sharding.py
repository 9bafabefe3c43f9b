"""Weights sharded over the devices layer by layer (`trainer=fsdp`)."""

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
    """The classes of the decoder's layers, which are the longest `nn.ModuleList`."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {type(layer) for layer in max(lists, key=len)}


def gathered(trainer: "Trainer") -> dict[str, Tensor] | None:
    """All weights of the trained model by name, gathered on the first device; None if they are not sharded.

    All devices must call this.
    """
    if not isinstance(trainer.strategy, FSDPStrategy):
        return None
    state = trainer.strategy.lightning_module_state_dict()
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
