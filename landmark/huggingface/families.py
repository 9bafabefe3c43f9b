"""The models of transformers that can have landmarks, their layers and their rotary frequencies."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from landmark.huggingface.attention import ATTENTION
from landmark.utils.errors import UserError

# Decoders that rotate whole heads, in pairs of element i and element i + d/2.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")
STATIC = ("default", "linear", "llama3", "yarn")  # rope types whose frequencies do not depend on the length of the text
FULL, SLIDING = "full_attention", "sliding_attention"


def check_model(model: Any) -> None:
    """Raise UserError, with the reason, if a model cannot have landmarks."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(f"{type(model).__name__} is not a causal language model of transformers")
    if config._attn_implementation in ATTENTION.values():  # pyright: ignore[reportOptionalMemberAccess]
        raise UserError(f"{type(model).__name__} has landmarks already")
    family = config.model_type  # pyright: ignore[reportOptionalMemberAccess]
    if family not in FAMILIES:
        if not getattr(config, "rope_parameters", None):
            raise UserError(f"{family}: has no rotary positions (RoPE), which the memory needs to move keys")
        raise UserError(f"{family}: not one of the decoders that landmarks are known to fit: {', '.join(FAMILIES)}")
    types = layer_types(model)
    if FULL not in types:
        raise UserError(
            f"{family}: every layer has a sliding window of {config.sliding_window}, so none can read earlier blocks; "  # pyright: ignore[reportOptionalMemberAccess]
            "if the weights allow it, set model.config.sliding_window = None first"
        )
    if (kind := rope_parameters(model)["rope_type"]) not in STATIC:
        raise UserError(
            f"{family}: rope_type={kind} rotates keys by angles that depend on the length of the text; "
            f"supported are those that do not: {', '.join(STATIC)}"
        )
    if (rotated := rope_parameters(model).get("partial_rotary_factor", 1.0)) != 1:
        raise UserError(
            f"{family}: partial_rotary_factor={rotated}: only heads that are rotated as a whole are supported"
        )
    if config._attn_implementation not in ATTENTION:  # pyright: ignore[reportOptionalMemberAccess]
        raise UserError(
            f"attn_implementation={config._attn_implementation}: "  # pyright: ignore[reportOptionalMemberAccess]
            f"load the model with one of {', '.join(ATTENTION)}"
        )
    for name in ("attention_dropout", "attn_logit_softcapping", "use_bidirectional_attention"):
        if value := getattr(config, name, None):
            raise UserError(f"{family}: {name}={value}: landmark attention does not support it, set it to 0 or None")


def layer_types(model: PreTrainedModel) -> list[str]:
    """The kind of attention of each layer, FULL or SLIDING."""
    config = model.config
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    window = getattr(config, "sliding_window", None)
    return [FULL if window is None else SLIDING] * config.num_hidden_layers


def rope_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """The rotary settings of the layers with full attention."""
    parameters = model.config.rope_parameters
    return parameters.get(FULL, parameters)


def inverse_frequencies(model: PreTrainedModel) -> Tensor:
    """Radians per position of each pair (d/2,) in layers with full attention, including the model's scaling."""
    rotary = cast(Any, model.get_decoder()).rotary_emb
    name = f"{FULL}_inv_freq" if hasattr(rotary, f"{FULL}_inv_freq") else "inv_freq"
    return getattr(rotary, name)
