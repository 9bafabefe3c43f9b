"""Tiny random models of every family, with and without landmarks, and a tokenizer of bytes; nothing is downloaded."""

import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from landmark.models.huggingface import wrap

SHAPE = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 16}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
WITHOUT_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
WITHOUT_KV = {name: value for name, value in WITHOUT_HEAD_DIM.items() if name != "num_key_value_heads"}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
HALF = PLAIN | {"partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDES = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
VISION |= {"image_size": 8, "patch_size": 4}
LLAMA4 = {"intermediate_size_mlp": 48, "attention_chunk_size": 12, "no_rope_layers": [1, 0, 0], "moe_layers": [1]}
GRANITE = {"attention_multiplier": 0.2, "residual_multiplier": 0.7}
GEMMA3 = SHAPE | SLIDES | {"query_pre_attn_scalar": 9}
CONFIGS = {  # model type and settings of each tiny model
    "llama": ("llama", SHAPE | {"attention_bias": True}),
    "llama_linear": ("llama", SHAPE | {"rope_parameters": LINEAR}),
    "llama3": ("llama", SHAPE | {"rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", SHAPE | {"rope_parameters": YARN}),
    "mistral": ("mistral", SHAPE | {"sliding_window": None}),
    "qwen2": ("qwen2", WITHOUT_HEAD_DIM),
    "qwen3": ("qwen3", SHAPE),
    "gemma": ("gemma", SHAPE),
    "gemma3": ("gemma3_text", GEMMA3),
    "mixtral": ("mixtral", SHAPE | EXPERTS | {"sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "phi3": ("phi3", WITHOUT_HEAD_DIM | {"sliding_window": None}),
    "olmo2": ("olmo2", WITHOUT_HEAD_DIM),
    "olmo3": ("olmo3", WITHOUT_HEAD_DIM | SLIDES),
    "smollm3": ("smollm3", WITHOUT_HEAD_DIM | {"no_rope_layers": [1, 0, 1]}),
    "granite": ("granite", WITHOUT_HEAD_DIM | GRANITE),
    "gemma2": ("gemma2", GEMMA3 | {"attn_logit_softcapping": 2.0}),
    "gpt_oss": ("gpt_oss", SHAPE | SLIDES | EXPERTS | {"rope_parameters": PLAIN}),
    "gpt_neox": ("gpt_neox", WITHOUT_KV | {"rope_parameters": HALF}),
    "phi": ("phi", WITHOUT_HEAD_DIM | {"rope_parameters": HALF}),
    "llama4_text": ("llama4_text", SHAPE | EXPERTS | LLAMA4),
    "gemma3_whole": ("gemma3", {"text_config": GEMMA3, "vision_config": VISION, "mm_tokens_per_image": 4}),
}
EAGER = "gemma2", "gemma3_whole", "gpt_oss"  # transformers has no exact other attention for these


def make_config(name: str, **changes):
    kind, settings = CONFIGS[name]
    return AutoConfig.for_model(kind, **settings | changes)


def make_model(family: str, implementation: str = "sdpa", seed: int = 0):
    """Random weights, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(family), attn_implementation=implementation)
    if "experts" in str(model).lower():
        model.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
    return model.eval()


def refused_models():
    """Models that cannot have landmarks, by a name for the table."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    windows = {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 3}
    parts = {"vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 8}}
    parts |= {"text_config": {"model_type": "llama", **SHAPE}, "image_token_index": 1}
    configs = {
        "GPT-2": AutoConfig.for_model("gpt2", vocab_size=257, n_embd=8, n_layer=1, n_head=1),
        "Cohere": AutoConfig.for_model("cohere", **WITHOUT_HEAD_DIM),
        "Llama, dynamic NTK": make_config("llama", rope_parameters=dynamic),
        "Qwen 2, windows everywhere": make_config("qwen2", **windows),
    }
    models = {name: AutoModelForCausalLM.from_config(config) for name, config in configs.items()}
    return models | {"Llava": LlavaForConditionalGeneration(AutoConfig.for_model("llava", **parts))}


def make_tokenizer(hole: int = 256, end: str = "<eot>", beginning: int | None = None) -> PreTrainedTokenizerFast:
    """256 bytes and an end of text. hole: an id that no token has. beginning: one that stands before each text."""
    letters = enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocab = {letter: number + (number >= hole) for number, letter in letters}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if beginning is not None:
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", beginning)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


BLOCK = 4
SETTINGS = {"block_size": BLOCK, "memory": {"k": 2}, "local": 9}
FREE = {"landmarks": "none", "memory": {"k": 3, "window": 7, "dense": 0}}


def wrapped_model(family: str, tokenizer=None, seed: int = 0, **settings):
    """A tiny model with landmarks, or without by `landmarks="none"`; None: a tokenizer of its own."""
    return wrap(make_model(family, seed=seed), tokenizer or make_tokenizer(), **{**SETTINGS, **settings})


def save_model(folder, model="llama", tokenizer=None):
    """A model, or a tiny one of this family, and a tokenizer, as transformers saves them. Returns the folder."""
    (make_model(model) if isinstance(model, str) else model).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


@torch.no_grad()
def read(model, ids, memory=None, parts=None):
    """Logits of all tokens, read in parts of so many tokens with a memory. None: an empty one, in one part."""
    memory = model.new_memory() if memory is None else memory
    return torch.cat([model(part, past_key_values=memory).logits for part in ids.split(parts or ids.shape[1], 1)], 1)


def fail_at(model, call):
    """Let the last layer of a model fail at this call of it, counted from 1; the hook can be removed."""
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("out of memory")

    return model.model.layers[2].register_forward_pre_hook(fail)


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
