"""Tiny random models of every family, and a tokenizer of bytes; nothing is downloaded."""

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SHAPE = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "llama_linear": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama3": lambda: LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama_yarn": lambda: LlamaConfig(
        **SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{name: value for name, value in SHAPE.items() if name != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "gemma": lambda: GemmaConfig(**SHAPE),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        query_pre_attn_scalar=9,
    ),
}


def make_model(family: str, implementation: str = "sdpa", seed: int = 0):
    """Random weights, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and an end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eot>")


@pytest.fixture(params=CONFIGS)
def family(request) -> str:
    return request.param


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()
