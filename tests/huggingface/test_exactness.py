"""Models with landmarks against their own layers and our memory, combined by hand."""

import copy
import math
from functools import partial

import pytest
import torch
from transformers import AttentionInterface

from landmark.attention.keys import Keys
from landmark.attention.layout import insert_landmarks
from landmark.huggingface import unwrap
from landmark.memory.construction import memory_of
from landmark.memory.settings import MemorySettings
from tests.huggingface.conftest import BLOCK, wrapped_model

SCALINGS = ["llama", "llama_linear", "llama3", "llama_yarn"]


def own_frequencies(config):
    """By the definitions in the papers of the scalings, in float64."""
    parameters, dim = config.rope_parameters, config.head_dim
    frequency = parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if parameters["rope_type"] == "default":
        return frequency
    factor = parameters["factor"]
    if parameters["rope_type"] == "linear":
        return frequency / factor
    original = parameters["original_max_position_embeddings"]
    if parameters["rope_type"] == "llama3":
        turns = original * frequency / (2 * math.pi)
        smooth = ((turns - parameters["low_freq_factor"]) / 3.0).clamp(0, 1)
        return frequency / factor * (1 - smooth) + frequency * smooth
    bounds = [dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1)]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequency / factor * ramp + frequency * (1 - ramp)


def side_by_side(x):
    """Element i beside i + d/2."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def by_memory(memory, module, q, k, v, mask, scaling, **_):
    """Attention of a layer whose queries and keys are all at position 0, which turns nothing, through a memory."""
    q = side_by_side(q) * scaling * math.sqrt(q.shape[-1])
    return memory.attend(module.layer_idx, q, side_by_side(k), v).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize(
    ("family", "granularity"),
    [*((family, "per_token_and_head") for family in SCALINGS), ("llama_yarn", "per_head"), ("llama", "per_token")],
)
@torch.no_grad()
def test_reading_with_a_memory_is_our_memory_on_the_same_weights(family, granularity, tokenizer):
    """k = 3 of at most 9 blocks, at their stingy positions."""
    settings = MemorySettings(k=3, granularity=granularity, max_blocks=9)
    wrapped = wrapped_model(family, tokenizer, memory=vars(settings), local=17).double()
    plain = unwrap(copy.deepcopy(wrapped))
    expected, memory = (
        [],
        memory_of(BLOCK, settings, keys=Keys(rope_base=own_frequencies(plain.config))),
    )
    AttentionInterface.register("by_memory", partial(by_memory, memory))
    plain.set_attn_implementation("by_memory")
    ids = torch.randint(0, 256, (2, 120), generator=torch.Generator().manual_seed(1))
    for chunk in ids.split(17, 1):
        tokens, own = insert_landmarks(chunk, memory.position, BLOCK, wrapped.landmarks.token)
        expected.append(plain(tokens, position_ids=torch.zeros_like(tokens), use_cache=False).logits[:, own])
        memory.commit()
    found = wrapped(ids, past_key_values=(cache := wrapped.new_memory())).logits
    assert cache.stats["blocks_retrieved"] > 0
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=0, atol=1e-5)  # the model's frequencies are float32
