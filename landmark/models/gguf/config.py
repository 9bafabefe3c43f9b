"""What a .gguf file's keys mean in transformers. A key that changes what is computed is used, or the file is refused.

Sources: llama.cpp's `convert_hf_to_gguf.py`, which writes the keys, and `src/models`, which says what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from landmark.models.gguf.file import GGUF
from landmark.models.gguf.types import dequantised
from landmark.utils.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Architecture:
    """How a family of models is written. family: its type in transformers. keys: names of the file's keys, and of the
    fields of its configuration. pairs: channels that are rotated together stand side by side in the rows of queries and
    keys. centred: the norms' weights have 1 added. fixed: what the file does not say.
    """

    family: str
    keys: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    centred: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SCALES = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
_SCALES |= {"logit_scale": "logits_scaling", "attention.scale": "attention_multiplier"}
_EXPERTS = {"expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
ARCHITECTURES = {
    "llama": Architecture("llama", pairs=True),
    "mixtral": Architecture("mixtral", {**_EXPERTS, "expert_count": "num_local_experts"}, pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", {**_EXPERTS, "expert_count": "num_experts"}, fixed={"norm_topk_prob": True}),
    "gemma": Architecture("gemma", centred=True),
    "gemma2": Architecture("gemma2", {**_CAPS, **_WINDOW}, centred=True),
    "gemma3": Architecture("gemma3_text", {**_CAPS, **_WINDOW}, centred=True),
    "phi3": Architecture("phi3", _WINDOW),
    "granite": Architecture("granite", _SCALES, pairs=True),
    "olmo2": Architecture("olmo2"),
    "smollm3": Architecture("smollm3", pairs=True),
}
_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_NEEDED = ("block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon")
# Keys that `config_of` reads one by one.
_READ = {"rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.value_length", "vocab_size"}
_ROPE = {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"}
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
_OF_GEMMA3 = {"attention.sliding_window_pattern", "rope.freq_base_swa"}
# Keys that change nothing, with any value or with these.
_NEUTRAL = {"rope.scaling.finetuned": None, "tensor_data_layout": None, "attention.causal": (True,)}
_NEUTRAL |= dict.fromkeys(["expert_count", "expert_used_count", "expert_shared_count", "pooling_type"], (0,))
_NEUTRAL |= dict.fromkeys(["attention.sliding_window", "rope.scaling.yarn_log_multiplier", *_CAPS], (0,))
_NEUTRAL |= dict.fromkeys(["rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", *_SCALES], (1,))
_NEUTRAL |= {"rope.scaling.yarn_attn_factor": (1,), "use_parallel_residual": (False,), "expert_weights_norm": (True,)}


def architecture_of(file: GGUF) -> Architecture:
    """Raises UserError for a model that is not read."""
    name = file.architecture
    if name == "llama" and file.keys.get("llama.expert_count"):
        name = "mixtral"
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: general.architecture={name}: such .gguf files are not read; read are "
            f"{', '.join(ARCHITECTURES)}: get the model in the format of transformers"
        )
    return ARCHITECTURES[name]


def config_of(file: GGUF) -> Any:
    """The configuration of a file's model. Raises UserError, naming the key, where one is missing or cannot be used."""
    from transformers import AutoConfig

    said, architecture = _keys(file), architecture_of(file)
    fields = {name: said[key] for key, name in (_COMMON | dict(architecture.keys)).items() if key in said}
    if (used := said.get("expert_used_count", 0)) > (experts := said.get("expert_count", 0)):
        raise _refused(file, "expert_used_count", used, f"there are {experts} experts")
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    rotated = said.get("rope.dimension_count")
    head_dim = said.get("attention.key_length") or (architecture.family == "llama" and rotated) or hidden // heads
    if (values := said.get("attention.value_length", head_dim)) != head_dim:
        raise _refused(file, "attention.value_length", values, f"keys have {head_dim} channels")
    rope = _rope(file, said)
    if rotated not in (None, head_dim):
        if architecture.family != "phi3":
            raise _refused(file, "rope.dimension_count", rotated, f"heads have {head_dim} channels")
        rope["partial_rotary_factor"] = rotated / head_dim
    if head_dim != hidden // heads or architecture.family.startswith(("gemma", "qwen3")):
        fields["head_dim"] = head_dim
    if architecture.family == "gemma3_text":
        fields |= _gemma3(said, rope, fields)
    else:
        fields["rope_parameters"] = rope
    if architecture.family in ("gemma2", "gemma3_text"):  # the largest of each scales by the width of the model
        is_largest = fields["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[architecture.family]
        fields["query_pre_attn_scalar"] = hidden // heads if is_largest else head_dim
    if architecture.family == "phi3":
        fields["sliding_window"] = fields.get("sliding_window") or None
    for name, tensor in {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}.items():
        fields |= {name: True} if f"blk.0.{tensor}" in file.tensors and architecture.family != "qwen2" else {}
    return AutoConfig.for_model(
        architecture.family,
        **{**fields, **architecture.fixed},
        vocab_size=_vocabulary(file, said),
        tie_word_embeddings="output.weight" not in file.tensors,
        **_ends(file.keys),
    )


def _keys(file: GGUF) -> dict[str, Any]:
    """The keys of the file's architecture, without its name. Raises UserError for one that is not used."""
    architecture, start = architecture_of(file), f"{file.architecture}."
    said = {key.removeprefix(start): value for key, value in file.keys.items() if key.startswith(start)}
    used = _READ | _ROPE | _COMMON.keys() | architecture.keys.keys()
    used |= _OF_GEMMA3 if architecture.family == "gemma3_text" else set()
    used |= _YARN.keys() | {"rope.scaling.attn_factor"} if said.get("rope.scaling.type") == "yarn" else set()
    for key, value in said.items():
        if key in used and isinstance(value, list) and key not in _OF_GEMMA3:
            raise _refused(file, key, value[:4], "one number for all layers is read")
        if key not in used and not (key in _NEUTRAL and (_NEUTRAL[key] is None or value in _NEUTRAL[key])):
            raise _refused(file, key, value, "it may change what is computed, and is not used here")
    if missing := [key for key in _NEEDED if not said.get(key)]:
        raise UserError(f"{file.path}: {start}{missing[0]} is missing: get the file again")
    return said


def _refused(file: GGUF, key: str, value: Any, why: str) -> UserError:
    return UserError(
        f"{file.path}: {file.architecture}.{key}={value}: {why}: get the model in the format of transformers"
    )


def _vocabulary(file: GGUF, said: dict[str, Any]) -> int:
    rows = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    for name, count in {"vocab_size": said.get("vocab_size", rows), "tokens": len(file.keys.get(TOKENS, ()))}.items():
        if count > rows or (name == "vocab_size" and count != rows):
            raise UserError(f"{file.path}: {name} are {count}, but token_embd.weight has {rows} rows: get it again")
    return rows


def _rope(file: GGUF, said: dict[str, Any]) -> dict[str, Any]:
    """The rotation of positions, as transformers describes it. Raises UserError for one that it does not know."""
    rope: dict[str, Any] = {"rope_theta": float(said.get("rope.freq_base", 1e4)), "rope_type": "default"}
    factor = said.get("rope.scaling.factor") or said.get("rope.scale_linear") or 1.0
    kind = said.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise _refused(file, "rope.scaling.type", kind, "read are none, linear and yarn")
    if kind == "yarn":
        original = said.get("rope.scaling.original_context_length")
        if not original:
            raise _refused(file, "rope.scaling.type", kind, "rope.scaling.original_context_length is missing")
        rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
        rope |= {name: float(said[key]) for key, name in _YARN.items() if key in said}
        if (more := said.get("rope.scaling.attn_factor", 1.0)) != 1:
            rope["attention_factor"] = float(more * (0.1 * torch.tensor(factor).log() + 1))
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": float(factor)}
    if (tensor := file.tensors.get("rope_freqs.weight")) is not None:
        if rope["rope_type"] != "default":
            raise _refused(file, "rope.scaling.type", kind, "rope_freqs.weight scales the rotation, too")
        rope |= _llama3(file, rope, dequantised(tensor.kind, tensor.rows()).flatten())
    return rope


def _llama3(file: GGUF, rope: dict[str, Any], factors: Tensor) -> dict[str, Any]:
    """The settings of Llama 3's rotation that divides the frequencies by these factors (d/2,)."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dims = 2 * len(factors)
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, dims, 2).float() / dims)
    found = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if bool((factors == 1).all()):
        return {}
    for original in (1 << power for power in range(5, 21)):
        settings = rope | found | {"original_max_position_embeddings": original}
        config = LlamaConfig(head_dim=dims, max_position_embeddings=original, rope_parameters=settings)
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        if torch.allclose(scaled, plain / factors, rtol=1e-4, atol=0):
            return settings
    raise UserError(f"{file.path}: rope_freqs.weight scales the rotation in a way that transformers does not know")


def _gemma3(said: dict[str, Any], rope: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """What layers with and without a window have of their own: their order, and their rotation."""
    pattern, layers = said.get("attention.sliding_window_pattern", 6), fields["num_hidden_layers"]
    slides = pattern if isinstance(pattern, list) else [bool((number + 1) % pattern) for number in range(layers)]
    local = {"rope_type": "default", "rope_theta": float(said.get("rope.freq_base_swa", 1e4))}
    return {
        "layer_types": [SLIDING if each else FULL for each in slides],
        "rope_parameters": {FULL: rope | {"rope_theta": float(said.get("rope.freq_base", 1e6))}, SLIDING: local},
    }


TOKENS = "tokenizer.ggml.tokens"
# Tokens that end a turn, by which llama.cpp too ends a text where the file names only the end of a document.
_TURN_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
_CONTROL = 3


def _ends(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of the tokens that begin, end and pad a text. Several ends are a list, the file's own first."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [id for name in names for id in _as_list(keys.get(f"tokenizer.ggml.{name}"))]
    tokens = enumerate(zip(keys.get(TOKENS, ()), keys.get("tokenizer.ggml.token_type", ()), strict=False))
    ids += [id for id, (text, kind) in tokens if kind == _CONTROL and text in _TURN_ENDS]
    ends = list(dict.fromkeys(ids))
    begin, pad = (keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    return {"bos_token_id": begin, "eos_token_id": ends[0] if len(ends) == 1 else ends or None, "pad_token_id": pad}


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
