"""A tiny model of a decoder's own class, in exact float64: what a family does is measured on it, not listed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils import logging

from landmark.utils.errors import UserError, in_one_line

HIDDEN, HEADS, HEAD_DIM, WINDOW, VOCABULARY, TRAINED = 64, 4, 16, 12, 64, 32
# Sizes by their names in configurations. Widths agree: heads · HEAD_DIM = HIDDEN, and of Mamba 8 · 16 = 2 · HIDDEN.
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "intermediate_size", "intermediate_size_mlp"), HIDDEN),
    **dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim", "block_ff_dim", "lru_width"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "swa_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "attention_head_dim", "kv_channels", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("swa_v_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_headdim"), HEAD_DIM),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("laurel_rank", "adapter_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "mamba_ngroups", "num_expert_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "zero_expert_num"), 4),
    **{"attention_hidden_size": 2 * HIDDEN, "max_position_embeddings": TRAINED, "linear_num_value_heads": 4},
    **{"original_max_position_embeddings": 32, "block_size": 16, "image_size": 8, "patch_size": 4},
}
DROPPED = ("quantization_config", "torch_dtype", "dtype", "landmark", "_name_or_path")


def tiny_config(config: Any) -> Any:
    """A configuration of the same class and the same layers, with small sizes."""
    while (kind := type(config)).__module__.startswith("landmark."):
        config = copy.copy(config)
        config.__class__ = kind.__bases__[-1]
    return kind.from_dict(_smaller(config.to_dict()))


def _smaller(values: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in values.items() if name not in DROPPED}
    for name, value in own.items():
        if name in ("per_layer_config", "mtp_per_layer_config") and isinstance(value, dict):
            own[name] = {layer: _layer_sizes(each, values) for layer, each in value.items()}
        elif isinstance(value, dict):
            own[name] = _smaller(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            own[name] = _small(name, value)
        elif isinstance(value, list) and value and name in SIZES and isinstance(value[0], int):
            own[name] = [_small(name, each) for each in value]
    if own.get("head_dim", HEAD_DIM) is None:
        own["head_dim"] = HEAD_DIM
    for keys, narrower in (("head_dim", "v_head_dim"), ("swa_head_dim", "swa_v_head_dim")):
        if 0 < (values.get(narrower) or 0) < (values.get(keys) or 0):
            own[narrower] = HEAD_DIM // 2
    if "mamba_d_ssm" in own:
        own["mamba_d_ssm"] = own["mamba_n_heads"] * own["mamba_d_head"]
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if few in own and many in own and values[few] == values[many]:
            own[few] = own[many]
    return own


def _small(name: str, value: int) -> int:
    if name.endswith("_token_id") and value >= VOCABULARY:
        return 0
    size = SIZES.get(name, value)
    return size if name.endswith(("dim", "head", "size")) and value > 0 else min(value, size)


def _layer_sizes(values: Any, common: dict[str, Any]) -> Any:
    """The sizes that a layer has for itself; heads that are wider than others' stay so."""
    small = _smaller(values)
    if values.get("head_dim", 0) > common.get("head_dim", HEAD_DIM):
        small["head_dim"] = 2 * HEAD_DIM
    return small


class _Doubled(TorchFunctionMode):
    """Computes in float64 what a model would compute in float32, as softmaxes, norms, rotations and states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = [torch.float64 if x is torch.float32 else x for x in args]
        return func(*args, **{name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()})


@contextmanager
def doubled() -> Iterator[None]:
    """Compute in float64, also where a model asks for float32, on the CPU; transformers logs errors alone."""
    before, verbosity = torch.get_default_dtype(), logging.get_verbosity()
    torch.set_default_dtype(torch.float64)
    logging.set_verbosity_error()
    try:
        with _Doubled(), torch.device("cpu"), torch.no_grad():
            yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_default_dtype(before)


def tiny_model(model: PreTrainedModel) -> PreTrainedModel:
    """A tiny model of the same class with random weights, in float64. Raises UserError where none can be made."""
    family, kind = model.config.model_type, cast(Any, type(model))
    kind = kind.__bases__[-1] if kind.__module__.startswith("landmark.") else kind
    is_eager = "eager" in str(model.config._attn_implementation) or getattr(
        model.config.get_text_config(decoder=True), "attn_logit_softcapping", None
    )
    with torch.random.fork_rng(devices=[]), doubled():
        torch.manual_seed(0)
        try:
            tiny = kind._from_config(tiny_config(model.config), attn_implementation="eager" if is_eager else "sdpa")
        except Exception as error:
            raise UserError(f"{family}: no tiny model of it could be made, to try it: {in_one_line(error)}") from error
        if any(hasattr(module, "num_experts") or "Experts" in type(module).__name__ for module in tiny.modules()):
            tiny.set_experts_implementation("eager")  # the others have no float64
        for name, weight in tiny.named_parameters():
            width = weight.shape[-1] if weight.ndim > 1 else 16
            weight.copy_(torch.randn_like(weight) / width**0.5 + (weight.ndim == 1 and "norm" in name))
        return tiny.double().eval()


# How keys turn: the name of the frequencies, whether pairs are neighbours, and the parameter of the attention module
# that scales keys afterwards ("": none does).
Turning = tuple[str, bool, str]
LENGTH, SETTLED, EXACT = 24, 12, 1e-8
NOT_TRIED = "a tiny model of it could not be tried"


def turnings(tiny: PreTrainedModel) -> dict[int, tuple[str, set[Turning] | None]]:
    """Of each layer the name of its attention module, and all descriptions of how its keys turn with their position
    that fit; None: they do not turn.

    All tokens are the same, and so is the input of each layer, at all positions: only positions tell keys apart.
    Raises UserError where attention does not go through the interface of transformers.
    """
    tiny, keys = copy.deepcopy(tiny), dict[int, tuple[nn.Module, Tensor]]()

    def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        keys[int(cast(Any, module).layer_idx)] = module, k[0]
        return q.new_zeros(*q.shape[:-1], v.shape[-1]).transpose(1, 2).contiguous(), None

    AttentionInterface.register("landmark_record", record)
    AttentionMaskInterface.register("landmark_record", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    if (layers := getattr(tiny.get_decoder(), "layers", None)) is None:
        raise UserError(f"{tiny.config.model_type}: its decoder has no `layers`, as those with rotary positions have")
    for layer in layers:
        layer.register_forward_pre_hook(_same_everywhere, with_kwargs=True)
    with doubled():
        try:
            tiny.set_attn_implementation("landmark_record")
            tiny(torch.ones(1, LENGTH, dtype=torch.int64), use_cache=False)
        except Exception as error:
            raise UserError(f"{tiny.config.model_type}: {NOT_TRIED}: {in_one_line(error)}") from error
        names = {module: name for name, module in tiny.named_modules()}
        return {layer: (names[module], _turning(module, k, tiny)) for layer, (module, k) in keys.items()}


def _same_everywhere(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a layer the first token's input (B, T, …) at all positions."""
    if args:
        args = args[0][:, :1].expand_as(args[0]).clone(), *args[1:]
    else:
        kwargs["hidden_states"] = kwargs["hidden_states"][:, :1].expand_as(kwargs["hidden_states"]).clone()
    return args, kwargs


def _turning(module: nn.Module, k: Tensor, tiny: PreTrainedModel) -> set[Turning] | None:
    """How keys (H, T, d) turn with their position, behind the first, which convolutions may tell apart."""
    k = k[:, SETTLED:]
    if _is_equal(k[:, :1].expand_as(k), k):
        return None
    scales = {"": torch.ones(k.shape[-1])}
    scales |= {name: x for name, x in module.named_parameters() if x.shape == k.shape[-1:] and bool(x.all())}
    return {
        (name, neighbours, scale)
        for scale, factors in scales.items()
        for name, frequencies in tiny.named_buffers()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        for neighbours in (False, True)
        if (turned := turn(k[:, :1] / factors, torch.arange(k.shape[1]), frequencies, neighbours)) is not None
        and _is_equal(turned * factors, k)
    }


def _is_equal(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) < EXACT * float(expected.abs().max())


def turn(x: Tensor, distance: Tensor, frequencies: Tensor, neighbours: bool) -> Tensor | None:
    """x (H, 1, d) at positions later in the text, (H, T, d); None: there are fewer channels than turn."""
    pairs = len(frequencies)
    if 2 * pairs > x.shape[-1]:
        return None
    x = halved(x, pairs) if neighbours else x
    angle = distance[:, None] * frequencies
    first, second, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    turned.append(rest.expand(-1, len(distance), -1))
    return together(torch.cat(turned, -1), pairs) if neighbours else torch.cat(turned, -1)


def halved(x: Tensor, pairs: int) -> Tensor:
    """Queries or keys (…, d), whose first channels are pairs of neighbours, with elements i and i + pairs as a pair."""
    return torch.cat([x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2], x[..., 2 * pairs :]], -1)


def together(x: Tensor, pairs: int) -> Tensor:
    """The opposite of `halved`."""
    return torch.cat([torch.stack(x[..., : 2 * pairs].chunk(2, -1), -1).flatten(-2), x[..., 2 * pairs :]], -1)
