"""Tiny random models of every family, with and without landmarks, and a tokenizer of bytes; nothing is downloaded."""

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from landmark.huggingface import wrap

SHAPE = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "llama_linear": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "llama3": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama_yarn": lambda: LlamaConfig(**SHAPE, rope_parameters=YARN),
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

WITHOUT_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
WITHOUT_KV = {name: value for name, value in WITHOUT_HEAD_DIM.items() if name != "num_key_value_heads"}
HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
SLIDES = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
VISION |= {"image_size": 8, "patch_size": 4}
FURTHER = {  # tested in test_families.py and test_training_free.py alone
    "mixtral": lambda: MixtralConfig(**SHAPE, **EXPERTS, sliding_window=None),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "phi3": lambda: Phi3Config(**WITHOUT_HEAD_DIM, sliding_window=None),
    "olmo2": lambda: Olmo2Config(**WITHOUT_HEAD_DIM),
    "olmo3": lambda: Olmo3Config(**WITHOUT_HEAD_DIM, **SLIDES),
    "smollm3": lambda: SmolLM3Config(**WITHOUT_HEAD_DIM, no_rope_layers=[1, 0, 1]),
    "granite": lambda: GraniteConfig(**WITHOUT_HEAD_DIM, attention_multiplier=0.2, residual_multiplier=0.7),
    "gemma2": lambda: Gemma2Config(**SHAPE, **SLIDES, attn_logit_softcapping=2.0, query_pre_attn_scalar=9),
    "gpt_oss": lambda: GptOssConfig(**SHAPE, **SLIDES, **EXPERTS, **PLAIN),
    "gpt_neox": lambda: GPTNeoXConfig(**WITHOUT_KV, **HALF),
    "phi": lambda: PhiConfig(**WITHOUT_HEAD_DIM, **HALF),
    "llama4_text": lambda: Llama4TextConfig(
        **SHAPE, **EXPERTS, intermediate_size_mlp=48, attention_chunk_size=12, no_rope_layers=[1, 0, 0], moe_layers=[1]
    ),
    "gemma3_whole": lambda: Gemma3Config(
        text_config={**SHAPE, **SLIDES, "query_pre_attn_scalar": 9}, vision_config=VISION, mm_tokens_per_image=4
    ),
}


def make_model(family: str, implementation: str = "sdpa", seed: int = 0):
    """Random weights, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config({**CONFIGS, **FURTHER}[family](), attn_implementation=implementation)
    if family in FURTHER and "experts" in str(model).lower():
        model.set_experts_implementation("eager")  # the others have no float64
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


BLOCK = 4
SETTINGS = {"block_size": BLOCK, "memory": {"k": 2}, "local": 9}


def wrapped_model(family: str, tokenizer=None, seed: int = 0, **settings):
    """A tiny model with landmarks, or without by `landmarks="none"`; None: a tokenizer of its own."""
    return wrap(make_model(family, seed=seed), tokenizer or make_tokenizer(), **{**SETTINGS, **settings})


@torch.no_grad()
def read(model, ids, memory=None, parts=None):
    """Logits of all tokens, read in parts of so many tokens with a memory. None: an empty one, in one part."""
    memory = model.new_memory() if memory is None else memory
    return torch.cat([model(part, past_key_values=memory).logits for part in ids.split(parts or ids.shape[1], 1)], 1)


@pytest.fixture(params=CONFIGS)
def family(request) -> str:
    return request.param


@pytest.fixture(params=["llama", "gemma3"])
def wrapped(request, tokenizer):
    """With landmarks; without and with layers that slide."""
    return wrapped_model(request.param, tokenizer)


@pytest.fixture
def llama(tokenizer):
    return wrapped_model("llama", tokenizer)


@pytest.fixture
def ids():
    return torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()
