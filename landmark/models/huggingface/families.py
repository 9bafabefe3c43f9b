"""The models of transformers that can have landmarks, their layers and their rotary frequencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from landmark.models.huggingface.attention import ATTENTION, with_landmarks
from landmark.models.huggingface.tiny import tiny_model, turnings
from landmark.utils.errors import UserError

# Decoders that can learn to use landmarks. They rotate heads, or their first channels, in pairs of i and i + r/2.
FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gemma3"),
    *("phi", "phi3", "olmo2", "olmo3", "smollm3", "granite", "gpt_neox", "gpt_oss", "llama4_text"),
)
# More decoders that the tests read without training, and whose positions are measured; others are tried first.
READ = (
    *("cohere2", "ernie4_5", "exaone4", "falcon_h1", "gemma3n_text", "gemma4", "gemma4_text", "glm4", "granite_swa"),
    *("granitemoehybrid", "hunyuan_v1_dense", "lfm2", "lfm3", "minimax_m2", "ministral3", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "seed_oss"),
)
ROUTED = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text")  # families whose experts wait for the device
CAPPED = ("gemma2",)  # families that can have a cap of the scores; others ignore attn_logit_softcapping
# Rope types whose frequencies do not depend on the length of the text.
STATIC = ("default", "linear", "llama3", "yarn", "proportional", "ntk_alpha")
# A hybrid layer has full attention and a recurrent state.
FULL, SLIDING, CHUNKED, HYBRID = "full_attention", "sliding_attention", "chunked_attention", "hybrid"
BESIDE = (SLIDING, CHUNKED, "linear_attention", "conv", "hybrid_sliding", "moe", "mlp")


def check_model(model: Any, is_free: bool = False) -> None:
    """Raise UserError, with the reason, if a model cannot have landmarks. is_free: it is to read without them."""
    if hasattr(model, "get_base_model"):
        raise UserError(f"{type(model).__name__}: give the model inside, wrap(model.get_base_model(), tokenizer)")
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise UserError(f"{type(model).__name__} is not a causal language model of transformers")
    family, config = model.config.model_type, text_config(model)
    implementation = str(config._attn_implementation)
    if implementation in ATTENTION.values():
        raise UserError(f"{type(model).__name__} has landmarks already")
    if family not in FAMILIES and not is_free:
        raise UserError(_why_not(model))
    if latent := _setting(config, "kv_lora_rank"):
        raise UserError(f"{family}: latent attention (kv_lora_rank={latent}) keeps no keys, whose means find blocks")
    check_layers(family, layer_types(model))
    if not landmark_layers(model) and window_size(model) is None:
        raise UserError(f"{family}: no layer has full attention, so there are no keys to choose from")
    if not landmark_layers(model):
        how = "set model.config.sliding_window = None first"
        if getattr(config, "layer_types", None) is not None:
            how = "load the model with layer_types=['full_attention', …], one for each layer, and sliding_window=None"
        raise UserError(
            f"{family}: every layer has a sliding window of {window_size(model)}, so none can read earlier blocks; "
            f"if the weights allow it, {how}"
        )
    if (kind := _rope_type(model)) not in STATIC:
        raise UserError(
            f"{family}: rope_type={kind} rotates keys by angles that depend on the length of the text; "
            f"supported are those that do not: {', '.join(STATIC)}"
        )
    if family == "llama4_text" and (turned := sorted(landmark_layers(model) - unrotated_layers(model))):
        raise UserError(f"{family}: layers {turned} have full attention and rotate neighbouring channels together")
    if with_landmarks(implementation) is None:
        raise UserError(f"attn_implementation={implementation}: load the model with one of {', '.join(ATTENTION)}")
    for name in ("use_bidirectional_attention", *([] if is_free else ["attention_dropout"])):
        if (value := _setting(config, name)) and (value != "vision" or not is_free):  # of images, which are not read
            raise UserError(f"{family}: {name}={value}: landmark attention does not support it, set it to 0 or None")


def check_layers(family: str, types: Iterable[str]) -> None:
    """Raise UserError where a layer chooses itself what it reads. types: of the layers, as configurations name them."""
    if others := sorted(set(types) - {FULL, HYBRID, *BESIDE}):
        raise UserError(f"{family}: layers of {', '.join(others)} choose what they read, so nothing is left to choose")


def _why_not(model: PreTrainedModel) -> str:
    """Why a model that is not of FAMILIES cannot have landmarks."""
    family, config = model.config.model_type, text_config(model)
    if config is not model.config:
        inner = f"its decoder of text, {config.model_type}," if config.model_type in FAMILIES else "no decoder of text"
        return f"{family}: reads more than text; landmarks fit {inner} loaded as a causal language model of its own"
    if not getattr(config, "rope_parameters", None):
        return f"{family}: has no rotary positions (RoPE), which the memory needs to move keys"
    known = ", ".join(FAMILIES)
    without = "landmarks='none' tries to read it without training"
    return f"{family}: not one of the decoders that landmarks fit: {known}; {without}"


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder of text, which may be a part of the model's."""
    return model.config.get_text_config(decoder=True)


def _setting(config: Any, name: str) -> Any:
    """A setting, of the first layer that has it where layers have their own; None: there is none."""
    if not getattr(config, "is_heterogeneous", False):
        return getattr(config, name, None)
    return next((x for each in config.per_layer_config if (x := getattr(each, name, None)) is not None), None)


def numbers_per_token(model: PreTrainedModel) -> int:
    """Numbers of keys and values that all layers with full attention keep of a token."""
    config, total = text_config(model), 0
    for number in landmark_layers(model) - set(shared_key_layers(model)):
        own = config.per_layer_config[number]
        heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        total += 2 * heads * head_dim(own)
    return total


def head_dim(config: Any) -> int:
    """Channels of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layer_types(model: PreTrainedModel) -> list[str]:
    """The kind of each layer, by transformers' names of kinds."""
    config = text_config(model)
    types = getattr(config, "layer_types", None)
    return list(types if types is not None else get_layer_types_and_kwargs(config)[0])


def cache_layers(model: PreTrainedModel) -> list[tuple[str, dict[str, Any]]]:
    """What transformers keeps of each layer: a kind, and settings of its class. "dummy": nothing."""
    return list(zip(*get_layer_types_and_kwargs(text_config(model)), strict=True))


def shared_key_layers(model: PreTrainedModel) -> dict[int, int]:
    """By the numbers of layers that read another's keys: the layer that has these."""
    modes, kinds = getattr(text_config(model), "kv_sharing_modes", None) or [], layer_types(model)
    having = {kind: number for number, (mode, kind) in enumerate(zip(modes, kinds, strict=False)) if mode == "store"}
    return {number: having[kinds[number]] for number, mode in enumerate(modes) if mode == "reuse"}


class Slides(NamedTuple):
    """The window of layers without full attention. size: its tokens. chunked: it begins anew after so many tokens."""

    size: int
    chunked: bool

    @staticmethod
    def of(config: Any) -> Slides | None:
        """Of a decoder's configuration; None: there are no such layers."""
        if (chunk := _setting(config, "attention_chunk_size")) is not None:
            return Slides(chunk, True)
        window = _setting(config, "sliding_window")
        return None if window is None else Slides(window, False)


def window_size(model: PreTrainedModel) -> int | None:
    """Tokens of the window of layers without full attention; None: there are none."""
    slides = Slides.of(text_config(model))
    return None if slides is None else slides.size


def landmark_layers(model: PreTrainedModel) -> frozenset[int]:
    """The numbers of the layers that read with landmarks: those with full attention."""
    return frozenset(number for number, kind in enumerate(layer_types(model)) if kind in (FULL, HYBRID))


class Rotation(NamedTuple):
    """How layers with full attention rotate queries and keys. frequencies: the name of the buffer that has them; None:
    no layer does. neighbours: whether channels 2i and 2i + 1 are a pair, not i and i + r/2. unrotated: layers that do
    not. scales: by layer, the name of the weight of a norm that scales keys after they were rotated.
    """

    frequencies: str | None
    neighbours: bool
    unrotated: frozenset[int]
    scales: dict[int, str]


def rotation_of(model: PreTrainedModel) -> Rotation:
    """Of a model that is not one of FAMILIES it is measured, once. Raises UserError where no description fits."""
    if model.config.model_type in FAMILIES:
        rotates = getattr(text_config(model), "no_rope_layers", None) or ()  # despite its name, 1 for layers that do
        return Rotation("inv_freq", False, frozenset(number for number, each in enumerate(rotates) if not each), {})
    known = vars(model).get("landmark_rotation")
    if known is None:
        known = cast(Any, model).landmark_rotation = _measured(model, tiny_model(model))
    return known


def _measured(model: PreTrainedModel, tiny: PreTrainedModel) -> Rotation:
    found, family, layers = turnings(tiny), model.config.model_type, landmark_layers(model)
    if missing := sorted(layers - set(found)):
        raise UserError(f"{family}: the attention of layers {missing} does not go through transformers' interface")
    turning = [each for layer in layers if (each := found[layer][1]) is not None]
    common = set.intersection(*turning) if turning else {(None, False, "")}
    if not common:
        raise UserError(
            f"{family}: its layers rotate keys in no way, or not in one way, that the cache can move them by"
        )
    frequencies, neighbours, scale = min(common, key=lambda each: each[2:] + each[:2])
    unrotated = frozenset(layer for layer in layers if found[layer][1] is None)
    scales = {layer: f"{found[layer][0]}.{scale}" for layer in layers - unrotated if scale}
    return Rotation(frequencies, neighbours, unrotated, scales)


def unrotated_layers(model: PreTrainedModel) -> frozenset[int]:
    """The numbers of the layers whose queries and keys are not rotated."""
    return rotation_of(model).unrotated


def rope_parameters(model: PreTrainedModel) -> dict[str, Any]:
    """The rotary settings of the layers with full attention; empty where there are none."""
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    return parameters.get(FULL, parameters) or {}


def _rope_type(model: PreTrainedModel) -> str:
    """How frequencies are scaled: as the settings say, but Hunyuan's module calls a fixed scaling by another name."""
    said = getattr(getattr(model.get_decoder(), "rotary_emb", None), "rope_type", None)
    return said if said == "ntk_alpha" else rope_parameters(model).get("rope_type", "default")


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers through which a text passes."""
    decoders = (getattr(module, "layers", None) for module in cast(Any, model.get_decoder()).modules())
    return next(layers for layers in decoders if isinstance(layers, nn.ModuleList))


def device_of_layer(model: PreTrainedModel, number: int) -> torch.device:
    """Where a layer computes; accelerate may keep its weights elsewhere."""
    layer = decoder_layers(model)[number]
    for module in layer.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            if (device := getattr(one, "execution_device", None)) is not None:
                return torch.device(device)
    return next(layer.parameters()).device


def softcap_of(model: PreTrainedModel) -> float | None:
    """The cap of the scores, which go through a tanh before the softmax; None: there is none."""
    return model.config.attn_logit_softcapping if model.config.model_type in CAPPED else None


@torch.no_grad()
def inverse_frequencies(model: PreTrainedModel) -> Tensor:
    """Radians per position of each pair that rotates, (r/2,), in layers with full attention, after scaling."""
    if model.config.model_type not in FAMILIES:
        name = rotation_of(model).frequencies
        return torch.zeros(0) if name is None else model.get_buffer(name)
    if model.config.model_type == "llama4_text":  # its layers with full attention do not rotate
        return torch.zeros(0)
    rotary = cast(Any, model.get_decoder()).rotary_emb
    return getattr(rotary, f"{FULL}_inv_freq" if hasattr(rotary, f"{FULL}_inv_freq") else "inv_freq")


def sliding_frequencies(model: PreTrainedModel, number: int) -> Tensor:
    """Radians per position of each pair that rotates in a layer with a sliding window. Raises UserError for a layer
    with a state, or with a rotation that is not known.
    """
    family, kind = model.config.model_type, layer_types(model)[number]
    if kind != SLIDING or family not in FAMILIES:
        raise UserError(f"several memories: {family} has layers ({kind}) that cannot follow those of another text")
    if number in unrotated_layers(model):
        return torch.zeros(0)
    rotary = cast(Any, model.get_decoder()).rotary_emb
    return getattr(rotary, f"{SLIDING}_inv_freq" if hasattr(rotary, f"{SLIDING}_inv_freq") else "inv_freq")


def memory_frequencies(model: PreTrainedModel) -> Tensor:
    """Radians per position of each pair of a head, (d/2,): 0 for channels that do not rotate."""
    frequencies = inverse_frequencies(model)
    return torch.cat([frequencies, frequencies.new_zeros(head_dim(text_config(model)) // 2 - len(frequencies))])


def unrotate(x: Tensor, position_ids: Tensor | None, inverse_frequencies: Tensor) -> Tensor:
    """Undo a model's rotation of queries or keys x (B, H, T, d), of whose first r channels i and i + r/2 form a pair.

    position_ids: (B or 1, T); None: all are 0. inverse_frequencies: (r/2,), radians a position. Returns (B, H, T, d)
    with the elements of a pair side by side, as in `landmark.memory`; channels that do not rotate stay where they are.
    """
    turning = 2 * len(inverse_frequencies)
    rotated, unrotated = x.split([turning, x.shape[-1] - turning], -1)
    pairs = torch.stack(rotated.chunk(2, -1), -1)
    if position_ids is not None:
        angle = position_ids[:, None, :, None].float() * inverse_frequencies.to(x.device).float()  # as the model does
        angle = angle.to(torch.promote_types(x.dtype, torch.float32))
        turn = torch.polar(torch.ones_like(angle), -angle)
        pairs = torch.view_as_real(torch.view_as_complex(pairs.to(angle.dtype)) * turn)
    turned_back = pairs.flatten(-2).to(x.dtype)
    return torch.cat([turned_back, unrotated], -1) if unrotated.shape[-1] else turned_back
