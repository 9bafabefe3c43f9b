"""Writes a model of transformers into a .gguf file, as llama.cpp's converter does, with weights of any type."""

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from landmark.models.gguf.types import KINDS

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "<|im_end|>", "<turn>"]
SHAPE = {"vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 3e-5}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROPE = {"rope_type": "default", "rope_theta": 5e4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
WINDOW = {"sliding_window": 12, "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "head_dim": 16}
GLOBAL = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0, "attention_multiplier": 0.2}
CASES = {  # by a name: the architecture of the file, the type in transformers, and settings of its tiny model
    "llama": ("llama", "llama", {"head_dim": 32, "attention_bias": True}),
    "llama3": ("llama", "llama", {"rope_parameters": LLAMA3}),
    "llama_linear": ("llama", "llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "qwen2_yarn": ("qwen2", "qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3moe", "qwen3_moe", {"num_experts": 4, "norm_topk_prob": True, "head_dim": 16, **EXPERTS}),
    "gemma": ("gemma", "gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "gemma2", WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", "gemma3_text", WINDOW | {"rope_parameters": GLOBAL, "tie_word_embeddings": True}),
    "phi3": ("phi3", "phi3", {"sliding_window": 12, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "granite": ("granite", "granite", GRANITE),
    "olmo2": ("olmo2", "olmo2", {}),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}),
}
KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}
VOCABULARY = {
    "general.type": "model",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [0.0] * len(TOKENS),
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 3, 3],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def make_model(case: str, seed: int = 0, **changes):
    """A tiny random model, norms and biases too."""
    torch.manual_seed(seed)
    _, kind, settings = CASES[case]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | settings | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1))
    return model.eval()


def keys_of(case: str, config) -> dict:
    """The keys of a file with this configuration, with the names that llama.cpp gives them."""
    arch = CASES[case][0]
    said = {key: getattr(config, name) for key, name in KEYS.items() if getattr(config, name, None) is not None}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    said |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        said["expert_count"] = experts
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    said["rope.freq_base"] = rope["rope_theta"]
    said["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1))
    if rope["rope_type"] in ("linear", "yarn"):
        said |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return VOCABULARY | {f"{arch}.{key}": value for key, value in said.items()}


def random_blocks(kind: str, rows: int, columns: int, seed: int, size: float = 0.1) -> np.ndarray:
    """Bytes (rows, bytes of a row) of random weights of about `size`, of any type with blocks."""
    rng, of = np.random.default_rng(seed), KINDS[kind]
    blocks = rng.integers(0, 256, (rows, columns // of.block, of.bytes), dtype=np.uint8)
    scale = size / 2 ** (of.bits - 1) / (32 if kind.endswith("_K") else 1)
    halves = {208: scale} if kind == "Q6_K" else {0: scale}
    if of.centre:  # minima make up for integers that are never negative
        halves[2] = scale * of.centre * (1 if kind.endswith("_K") else -1)
    for place, mean in halves.items():
        numbers = mean * rng.uniform(0.5, 1.5, blocks.shape[:2])
        blocks[..., place : place + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path, case: str, model, kind="F32", keys=None, tensors=None, parts=1):
    """Write the model. kind: of its matrices, or a function of a tensor's name; the model gets the weights that the
    file has then. keys, tensors: others than the model's own, by name; None leaves one out.
    """
    arch, config = CASES[case][0], model.config
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=0 if parts == 1 else 8)
    for name, value in {**keys_of(case, config), **(keys or {})}.items():
        _add(writer, name, value)
    for seed, (name, weight) in enumerate(_by_name_in_file(case, model).items()):
        chosen = kind(name) if callable(kind) else kind
        matrix = weight.detach().float().numpy()
        if matrix.ndim > 1 and chosen in KINDS:
            raw = random_blocks(chosen, len(matrix.reshape(-1, matrix.shape[-1])), matrix.shape[-1], seed)
            of_file = gguf.GGMLQuantizationType[chosen]
            weight.data.copy_(torch.from_numpy(gguf.dequantize(raw, of_file)).view(weight.shape))
            writer.add_tensor(name, raw.reshape(*matrix.shape[:-1], -1), raw_dtype=of_file)
        else:
            writer.add_tensor(name, matrix + 1 if arch.startswith("gemma") and "norm" in name else matrix)
    for name, matrix in (tensors or {}).items():
        writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _turn_back(case, model)
    return path


def _by_name_in_file(case: str, model) -> dict:
    """The weights by the names of the file, with the rows that rotate together side by side, in place."""
    arch, config, found = CASES[case][0], model.config, {}
    _turn(case, model)
    key = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        layer = name.split(".")[2] if name.startswith("model.layers") else ""
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.data.chunk(2, 1), strict=True):
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = half
        elif name.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = weight.data
        else:
            found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight.data
    return found


def _turn(case: str, model) -> None:
    for heads, weight in _rotating(case, model):
        weight.copy_(weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2))


def _turn_back(case: str, model) -> None:
    """By transformers' own code."""
    for heads, weight in _rotating(case, model):
        weight.copy_(torch.from_numpy(LlamaTensorProcessor()._reverse_permute_weights(weight.numpy(), heads).copy()))


def _rotating(case: str, model):
    if CASES[case][0] not in ("llama", "granite", "smollm3"):
        return
    for name, weight in model.named_parameters():
        for kind, heads in {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}.items():
            if f"{kind}_proj." in name:
                yield heads, weight.data


def _add(writer, name: str, value) -> None:
    if value is None:
        return
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(name, value)
