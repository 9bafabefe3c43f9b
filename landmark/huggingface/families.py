"""The models of transformers that can have landmarks, their layers and their rotary frequencies."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from landmark.huggingface.attention import ATTENTION
from landmark.utils.errors import UserError

# Decoders that rotate heads, or their first channels, in pairs of element i and element i + d/2.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")
STATIC = ("default", "linear", "llama3", "yarn")  # rope types whose frequencies do not depend on the length of the text
FULL, SLIDING = "full_attention", "sliding_attention"


def check_model(model: Any) -> None:
    """Raise UserError, with the reason, if a model cannot have landmarks."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(f"{type(model).__name__} is not a causal language model of transformers")
    config: Any = model.config
    if config._attn_implementation in ATTENTION.values():
        raise UserError(f"{type(model).__name__} has landmarks already")
    family = config.model_type
    if family not in FAMILIES:
        raise UserError(_why_not(family, config))
    types = layer_types(model)
    if FULL not in types:
        raise UserError(
            f"{family}: every layer has a sliding window of {config.sliding_window}, so none can read earlier blocks; "
            f"{_without_windows(config)}"
        )
    if (kind := rope_parameters(model)["rope_type"]) not in STATIC:
        raise UserError(
            f"{family}: rope_type={kind} rotates keys by angles that depend on the length of the text; "
            f"supported are those that do not: {', '.join(STATIC)}"
        )
    if config._attn_implementation not in ATTENTION:
        raise UserError(
            f"attn_implementation={config._attn_implementation}: load the model with one of {', '.join(ATTENTION)}"
        )
    for name in ("attention_dropout", "attn_logit_softcapping", "use_bidirectional_attention"):
        if value := getattr(config, name, None):
            raise UserError(f"{family}: {name}={value}: landmark attention does not support it, set it to 0 or None")


def _why_not(family: str, config: Any) -> str:
    """Why models that are not one of FAMILIES cannot have landmarks."""
    if config.get_text_config() is not config:
        return f"{family}: reads more than text: give the decoder of its text alone, as a causal language model"
    if not getattr(config, "rope_parameters", None):
        return f"{family}: has no rotary positions (RoPE), which the memory needs to move keys"
    return f"{family}: not one of the decoders that landmarks are known to fit: {', '.join(FAMILIES)}"


def _without_windows(config: Any) -> str:
    """How to load a model without sliding windows."""
    if getattr(config, "layer_types", None) is None:
        return "if the weights allow it, set model.config.sliding_window = None first"
    return (
        "if the weights allow it, load the model with layer_types=['full_attention', …], one for each layer, and "
        "sliding_window=None"
    )


def layer_types(model: PreTrainedModel) -> list[str]:
    """The kind of attention of each layer, FULL or SLIDING."""
    config: Any = model.config
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    window = getattr(config, "sliding_window", None)
    return [FULL if window is None else SLIDING] * config.num_hidden_layers


def landmark_layers(model: PreTrainedModel) -> frozenset[int]:
    """The numbers of the layers that read with landmarks: those with full attention."""
    return frozenset(number for number, kind in enumerate(layer_types(model)) if kind == FULL)


def still_layers(model: PreTrainedModel) -> frozenset[int]:
    """The numbers of the layers whose queries and keys are not rotated."""
    rotates = getattr(model.config, "no_rope_layers", None) or ()  # despite its name, 1 for layers that rotate
    return frozenset(number for number, each in enumerate(rotates) if not each)


def rope_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """The rotary settings of the layers with full attention."""
    parameters = model.config.rope_parameters
    return parameters.get(FULL, parameters)


@torch.no_grad()
def inverse_frequencies(model: PreTrainedModel) -> Tensor:
    """Radians per position of each pair that rotates, (r/2,), in layers with full attention, after scaling."""
    rotary = cast(Any, model.get_decoder()).rotary_emb
    name = f"{FULL}_inv_freq" if hasattr(rotary, f"{FULL}_inv_freq") else "inv_freq"
    frequencies = getattr(rotary, name)
    if frequencies.is_meta:  # accelerate keeps the model's tensors elsewhere
        kind = rope_parameters(model)["rope_type"]
        compute = rotary.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
        layer = {"layer_type": FULL} if name != "inv_freq" else {}
        frequencies = compute(model.config, device="cpu", **layer)[0]
    return frequencies


def memory_frequencies(model: PreTrainedModel) -> Tensor:
    """Radians per position of each pair of a head, (d/2,): 0 for channels that do not rotate."""
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = inverse_frequencies(model)
    return torch.cat([frequencies, frequencies.new_zeros(head_dim // 2 - len(frequencies))])
