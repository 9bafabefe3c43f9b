"""A model's weights: a short string that tells models apart whose keys and values differ, and a check of numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from landmark.utils.errors import UserError

PIECE = 1 << 24  # numbers hashed at a time
WITHIN = {"base_layer", "token_adapter", "original_module"}  # parts of names that adapters add to a layer's weights
_known: Any = WeakTensorKeyDictionary()  # contents of tensors that were hashed, with the state in which they were


def weights_digest(model: nn.Module) -> str:
    """Hex SHA-256 of all that decides a model's keys and values: its weights and used adapters, but the output
    embedding. A weight is hashed again only after it has changed. Raises UserError for a weight whose content cannot be
    found.
    """
    digest = hashlib.sha256()
    ignored = tuple(_ignored(model))
    for name, weight in model.state_dict(keep_vars=True).items():
        if isinstance(weight, Tensor) and not name.startswith(ignored):
            plain = ".".join(part for part in name.split(".") if part not in WITHIN)
            digest.update(f"{plain} {_content(_kept(model, name, weight))}\n".encode())
    for name, module in model.named_modules():
        if hasattr(module, "weight_digest") and not f"{name}.".startswith(ignored):  # its weights are a file's
            digest.update(f"{name}.weight {cast(Any, module).weight_digest()}\n".encode())
        for adapter in _used_adapters(module):
            digest.update(f"{name} {adapter} {getattr(module, 'scaling', {}).get(adapter)}\n".encode())
    return digest.hexdigest()


def weights_state(model: nn.Module) -> int:
    """A number of this process that changes where weights change in place (not by `.data`), or adapters."""
    versions = [weight.dtype for weight in model.parameters() if weight.is_inference()]
    versions += [(weight.dtype, weight._version) for weight in model.parameters() if not weight.is_inference()]
    adapters = [
        (name, tuple(_used_adapters(module)), tuple(cast(Any, module).merged_adapters))
        for name, module in model.named_modules()
        if hasattr(module, "adapter_layer_names")
    ]
    return hash((tuple(versions), tuple(adapters)))


def check_finite(model: nn.Module, folder: Path) -> None:
    """Raise UserError, naming folder and weight, where a model just loaded has a weight that is not finite."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and weight.numel() and not all(each.isfinite() for each in weight.aminmax()):
            raise UserError(
                f"{folder}: the weight {name} has values that are not finite: nothing can be computed with it, train "
                "again with a lower train.max_lr, or name another run"
            )


def _ignored(model: nn.Module) -> Iterator[str]:
    """Beginnings of the names of weights that decide no keys and values."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if module is output:
            yield f"{name}."
        used = _used_adapters(module)
        for kind in (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ())):
            weights: Any = module
            for part in kind.split("."):
                weights = getattr(weights, part, None)
            names = weights.keys() if isinstance(weights, nn.ModuleDict | nn.ParameterDict | dict) else ()
            names = names or [each for each, _ in getattr(weights, "named_buffers", list)()]
            yield from (f"{name}.{kind}.{adapter}" for adapter in names if adapter not in used)


def _used_adapters(module: Any) -> list[str]:
    """The adapters of a layer that change its output and are not merged into its weights."""
    if not hasattr(module, "adapter_layer_names") or module.disable_adapters or module.merged_adapters:
        return []
    return list(module.active_adapters)


def _kept(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """A weight itself, which accelerate may keep elsewhere."""
    if not weight.is_meta:
        return weight
    parts = name.split(".")
    for count in range(len(parts)):
        hook: Any = getattr(model.get_submodule(".".join(parts[:count])), "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            with suppress(KeyError):
                return (getattr(one, "weights_map", None) or {})[".".join(parts[count:])]
    raise UserError(f"{name}: the weight has no content here (it is on torch's meta device): load the model's weights")


def _content(weight: Tensor) -> str:
    """Hex SHA-256 of a tensor's shape, type and numbers."""
    if is_traceable_wrapper_subclass(weight):  # as of quantised weights
        names, context = weight.__tensor_flatten__()
        parts = [f"{name} {_content(getattr(weight, name))}" for name in names]
        described = re.sub(r" at 0x[0-9a-f]+", "", repr(context))
        return hashlib.sha256("\n".join([type(weight).__name__, described, *parts]).encode()).hexdigest()
    flat = weight.detach().reshape(-1)
    state = None
    if not weight.is_inference():
        # Changes by way of `.data` do not count as another version; they change some of these numbers.
        state = weight.data_ptr(), weight._version, bytes(_bytes(flat[:: max(1, len(flat) // 64)]))
    found, known = _known.get(weight, (None, ""))
    if state is not None and found == state:
        return known
    digest = hashlib.sha256(f"{tuple(weight.shape)} {weight.dtype}\n".encode())
    for piece in flat.split(PIECE):
        digest.update(_bytes(piece))
    if state is not None:
        _known[weight] = state, digest.hexdigest()
    return digest.hexdigest()


def _bytes(numbers: Tensor) -> memoryview:
    """The bytes of numbers (n,), which stay where they are on a CPU."""
    return numbers.cpu().contiguous().view(torch.uint8).numpy().data
