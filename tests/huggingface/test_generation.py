"""What transformers' own `generate` gives back, streams and counts, once a model has landmarks."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from landmark.huggingface import wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_model

BLOCK = 4


@pytest.fixture
def wrapped(tokenizer):
    return wrap(make_model("llama"), tokenizer, block_size=BLOCK, memory={"k": 2}, local=9)


@pytest.fixture
def ids():
    return torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(0))


def greedily(model, ids, count):
    """The most probable token that is not the landmark, one after the other."""
    memory, text = model.new_memory(), ids
    logits = model(ids, past_key_values=memory).logits
    for _ in range(count):
        logits[..., model.landmarks.token] = -torch.inf
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        logits = model(text[:, -1:], past_key_values=memory).logits
    return text


class Collector:
    def __init__(self):
        self.ids = []

    def put(self, value):
        self.ids.append(value.flatten())

    def end(self):
        pass


def test_generates_the_most_probable_tokens(family, ids, tokenizer):
    model = wrap(make_model(family), tokenizer, block_size=BLOCK, memory={"k": 2}, local=9)
    found = model.generate(ids, max_new_tokens=23, do_sample=False)
    assert torch.equal(found, greedily(model, ids, 23))


def test_no_landmark_is_returned_streamed_or_counted(wrapped, ids):
    """Even a model that wants to say nothing else."""
    with torch.no_grad():
        wrapped.get_output_embeddings().weight[wrapped.landmarks.token] *= 100
    streamer = Collector()
    found = wrapped.generate(ids[:1], max_new_tokens=13, do_sample=False, streamer=streamer)
    assert found.shape == (1, 43)
    assert torch.equal(torch.cat(streamer.ids), found[0])
    assert not bool((found == wrapped.landmarks.token).any())


def test_sampling_gives_several_answers(wrapped, ids):
    torch.manual_seed(0)
    found = wrapped.generate(ids, max_new_tokens=6, do_sample=True, num_return_sequences=3)
    assert found.shape == (6, 36)
    assert torch.equal(found[:, :30], ids.repeat_interleave(3, 0))
    assert len({tuple(row) for row in found.tolist()}) > 2


def test_goes_on_with_a_memory(wrapped, ids):
    """As in a conversation: the input repeats the text so far, and only the new part is read."""
    memory = wrapped.new_memory()
    first = wrapped.generate(ids, max_new_tokens=5, do_sample=False, past_key_values=memory)
    longer = torch.cat([first, ids[:, :11]], 1)
    found = wrapped.generate(longer, max_new_tokens=5, do_sample=False, past_key_values=memory)
    assert memory.get_seq_length() == 30 + 5 + 11 + 5 - 1
    assert torch.equal(found[:, :46], longer)
    memory.reset()
    assert memory.get_seq_length() == 0
    again = wrapped.generate(ids, max_new_tokens=5, do_sample=False, past_key_values=memory)
    assert torch.equal(again, first)


def test_new_memory_settings_limit_the_blocks(wrapped, ids):
    memory = wrapped.new_memory(max_blocks=3)
    wrapped.generate(ids, max_new_tokens=2, do_sample=False, past_key_values=memory)
    assert memory.stats["blocks_kept"] == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"generation_config": GenerationConfig(num_beams=3, do_sample=True)}, "beam sample"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"use_cache": False}, "use_cache"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"past_key_values": DynamicCache()}, "new_memory"),
    ],
)
def test_modes_that_lose_the_memory_are_refused(wrapped, ids, settings, said):
    with pytest.raises(UserError, match=said):
        wrapped.generate(ids, max_new_tokens=3, **settings)


def test_a_prompt_with_landmarks_is_refused(wrapped, ids, tokenizer):
    ids[1, 7] = wrapped.landmarks.token
    with pytest.raises(UserError, match="landmarks"):
        wrapped.generate(ids, max_new_tokens=2)
    text = torch.tensor([tokenizer("some <landmark> text")["input_ids"]])
    with pytest.raises(UserError, match="leave them out"):
        wrapped.generate(text, max_new_tokens=2)


def test_padding_and_labels_are_refused(wrapped, ids):
    mask = torch.ones_like(ids)
    wrapped.generate(ids, attention_mask=mask, max_new_tokens=1)
    mask[0, :3] = 0
    with pytest.raises(UserError, match="padding"):
        wrapped.generate(ids, attention_mask=mask, max_new_tokens=1)
    with pytest.raises(UserError, match="labels"):
        wrapped(ids, labels=ids, past_key_values=wrapped.new_memory())
    with pytest.raises(UserError, match="logits_to_keep"):
        wrapped(ids, logits_to_keep=torch.tensor([0]), past_key_values=wrapped.new_memory())


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_blocks_on_other_tiers(wrapped, ids, tier, tmp_path):
    """The memory can be saved, and loaded by the same model."""
    long = ids.repeat(1, 3)
    expected = wrapped(long, past_key_values=(here := wrapped.new_memory())).logits
    memory = wrapped.new_memory(tier=tier)
    assert torch.equal(wrapped(long, past_key_values=memory).logits, expected)
    memory.memory.save(tmp_path / "kept")
    again = wrapped.new_memory(tier=tier)
    again.memory.load(tmp_path / "kept")
    found, expected = (wrapped(ids, past_key_values=cache).logits for cache in (again, here))
    assert torch.equal(found, expected)


@torch.no_grad()
def test_reads_under_autocast(family, tokenizer, ids):
    """Rotary positions make queries and keys float32 there, values stay in half precision."""
    model = wrap(make_model(family), tokenizer, block_size=BLOCK, memory={"k": 2}, local=9)
    phase = torch.zeros(len(ids), dtype=torch.int64)
    exact = model(ids, past_key_values=model.new_memory()).logits
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids, phase=phase).logits.isfinite().all()
        ours = model(ids, past_key_values=model.new_memory()).logits
    assert (ours - exact).abs().median() < 0.05  # some query may choose another block
