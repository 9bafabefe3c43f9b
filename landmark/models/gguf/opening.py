"""The model of a .gguf file, with its integers as they are or with its weights expanded."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landmark.models.gguf.config import Architecture, architecture_of, config_of
from landmark.models.gguf.file import GGUF, Stored, opened
from landmark.models.gguf.linear import (
    Quantized,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    bytes_by_form,
    expanded,
    is_packable,
)
from landmark.models.gguf.types import PLAIN, dequantised
from landmark.utils.errors import UserError

_EXPERTS = re.compile(r"model\.layers\.(\d+)\..*experts\.(gate_up|down)_proj")
_OF_ROTATION, _HEAD, _EMBEDDING = "rope_freqs.weight", "lm_head.weight", "token_embd.weight"
_log = logging.getLogger(__name__)


def open_gguf(path: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu", **settings: Any) -> Any:
    """The causal language model of a file, in evaluation mode.

    On a CPU, weights of a `dtype` of bfloat16 stay the integers of the file (`QuantizedLinear`). In another type, or on
    another device, or on a CPU that has no product of packed integers, they are expanded, and can be trained. settings:
    of transformers' `from_config`. Raises UserError, naming file and tensor, for a file that is not whole or not read.
    """
    file, model = opened(path), empty_model(path, dtype, **settings)
    architecture, weights, given = architecture_of(file), dict(model.named_parameters()), set[str]()
    stays = is_packable(device, dtype)
    names, plain = _names(file, model), {}
    _check_shapes(file, names, weights)
    for name, sources in names.items():
        tensors = [file.tensors[source] for source in sources]
        given |= {*sources}
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        if stays and leaf == "weight" and tensors[0].kind not in PLAIN and isinstance(module, nn.Linear | nn.Embedding):
            model.set_submodule(module_name, _quantised(module, tensors[0], dtype, _order(architecture, name, model)))
        elif stays and _EXPERTS.fullmatch(name) and _are_integers(file, module_name, names):
            if leaf == "down_proj":
                gate, up = (file.tensors[source] for source in names[f"{module_name}.gate_up_proj"])
                experts = QuantizedExperts({"gate": gate, "up": up, "down": tensors[0]}, module.act_fn)
                model.set_submodule(module_name, experts)
        elif (name, sources) != (_HEAD, [_EMBEDDING]):  # else the head is the embedding
            plain[name] = _weights(architecture, tensors, name, model, dtype)
    if unused := sorted(file.tensors.keys() - given - {_OF_ROTATION}):
        raise UserError(f"{file.path}: tensor {unused[0]} is not known to models of {architecture.family}")
    model.load_state_dict(plain, strict=False, assign=True)
    if not isinstance(model.get_output_embeddings(), QuantizedLinear):
        model.tie_weights()
    if stays:
        said = ", ".join(f"{count / 1e6:,.0f} MB {form}" for form, count in bytes_by_form(model).items())
        _log.info("%s: its weights take %s", path, said)
    return model.to(device).eval()


def empty_model(path: str | Path, dtype: torch.dtype, **settings: Any) -> Any:
    """The model of a file, whose weights are on torch's meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config_of(opened(path)), dtype=dtype, **settings)


def _names(file: GGUF, model: Any) -> dict[str, list[str]]:
    """The tensors of the file that hold each weight of a model. Raises UserError where one is missing."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # pyright: ignore[reportMissingImports]

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known, names = get_tensor_name_map(arch, model.config.num_hidden_layers), dict[str, list[str]]()
    for name, _ in model.named_parameters(remove_duplicate=False):
        if (expert := _EXPERTS.fullmatch(name)) is not None:
            parts = ("gate", "up") if expert[2] == "gate_up" else ("down",)
            names[name] = [f"blk.{expert[1]}.ffn_{part}_exps.weight" for part in parts]
        else:
            names[name] = [f"{known.get_name(name, try_suffixes=('.weight', '.bias'))}"]
        if name == _HEAD and model.config.tie_word_embeddings:
            names[name] = [_EMBEDDING]
        for source in names[name]:
            if source not in file.tensors:
                raise UserError(f"{file.path}: tensor {source} ({name}) is missing: get the file again")
    return names


def _check_shapes(file: GGUF, names: dict[str, list[str]], weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        expected = tuple(weight.shape)
        if len(names[name]) > 1:  # gates and others of experts, side by side
            expected = (expected[0], expected[1] // len(names[name]), *expected[2:])
        for source in names[name]:
            if (found := file.tensors[source].shape) != expected:
                raise UserError(
                    f"{file.path}: tensor {source} has the shape {found}, not {expected}, for which its keys ask: get "
                    "the file again"
                )


def _quantised(module: Any, stored: Stored, dtype: torch.dtype, order: Tensor | None) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(stored, dtype, getattr(module, "embed_scale", None))
    return QuantizedLinear(stored, module.bias, order, is_tied=stored.name == _EMBEDDING)


def _are_integers(file: GGUF, experts: str, names: dict[str, list[str]]) -> bool:
    """Whether all matrices of a module of experts are integers in the file."""
    sources = [*names[f"{experts}.gate_up_proj"], *names[f"{experts}.down_proj"]]
    return all(file.tensors[source].kind not in PLAIN for source in sources)


def _order(architecture: Architecture, name: str, model: Any) -> Tensor | None:
    """The order of rows where the file has channels side by side that transformers rotates half a head apart."""
    if not architecture.pairs or not (part := re.search(r"\.([qk])_proj\.", name)):
        return None
    config = model.config
    heads = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
    rows = model.get_submodule(name.rpartition(".")[0]).out_features
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _weights(architecture: Architecture, tensors: list[Stored], name: str, model: Any, dtype: torch.dtype) -> Tensor:
    """A weight in numbers, as transformers has it."""
    order = _order(architecture, name, model)
    if len(tensors[0].shape) == 1:  # a norm or a bias
        vector = dequantised(tensors[0].kind, tensors[0].rows()).flatten()
        if architecture.centred and name.endswith("norm.weight"):
            vector = vector - 1
        return (vector if order is None else vector[order]).to(dtype)
    parts = [expanded(tensor, dtype, order) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def is_quantised(model: nn.Module) -> bool:
    """Whether layers of a model have the integers of a file as weights."""
    return any(isinstance(each, Quantized) for each in model.modules())
