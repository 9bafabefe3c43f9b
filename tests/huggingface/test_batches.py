"""Batches of prompts of different lengths: each prompt is read as if it were alone."""

from functools import partial

import pytest
import torch
from transformers import pipeline

from landmark.utils.errors import UserError
from tests.huggingface.conftest import FREE, fail_at, wrapped_model

LENGTHS = 30, 3, 17, 1, 24


@pytest.fixture
def wrapped(wrapped):
    return wrapped.double()


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=generator) for length in LENGTHS]


def padded(texts, side):
    """Ids and mask, (texts, longest)."""
    masks = [torch.ones_like(text) for text in texts]
    return [torch.nn.utils.rnn.pad_sequence(x, True, 0, padding_side=side) for x in (texts, masks)]


@pytest.mark.parametrize(("side", "goes_on"), [("left", False), ("left", True), ("right", True)])
@pytest.mark.parametrize("settings", [{}, FREE], ids=["landmarks", "without"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_padded_texts_are_read_as_one_by_one(family, settings, texts, side, goes_on, tokenizer):
    """In one call and in one that goes on, from nothing (left) or from texts of one length (right); some go beyond the
    positions of the training, others do not."""
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    wrapped = wrapped_model(family, tokenizer, **settings).double()
    wrapped.config.max_position_embeddings = 25
    (ids, mask), memory = padded(texts, side), wrapped.new_memory()
    before, more = (torch.arange(columns * len(texts)).view(len(texts), columns) for columns in (11, 10))
    if goes_on:
        wrapped(before, past_key_values=memory)
    found = wrapped(ids, attention_mask=mask, past_key_values=memory, output_hidden_states=True)
    after = wrapped(more, attention_mask=torch.cat([mask, torch.ones_like(more)], 1), past_key_values=memory).logits
    assert memory.get_seq_length() == 40 + 11 * goes_on
    for row, text in enumerate(texts):
        alone, own = wrapped.new_memory(), mask[row].bool()
        if goes_on:
            wrapped(before[row : row + 1], past_key_values=alone)
        expected = wrapped(text[None], past_key_values=alone, output_hidden_states=True)
        close(found.logits[row, own], expected.logits[0])
        assert not found.logits[row, ~own].any()
        close(found.hidden_states[1][row, own], expected.hidden_states[1][0])
        close(after[row], wrapped(more[row : row + 1], past_key_values=alone).logits[0])
    if side == "left" and not goes_on and settings is not FREE:  # there tokens without logits choose together
        last = wrapped(ids, attention_mask=mask, past_key_values=wrapped.new_memory(), logits_to_keep=2).logits
        close(last, found.logits[:, -2:])


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": False, "num_beams": 2}])
def test_padded_prompts_are_answered_as_one_by_one(wrapped, texts, settings):
    ids, mask = padded(texts[1:4], "left")
    found = wrapped.generate(ids, attention_mask=mask, max_new_tokens=7, **settings)
    for row, text in enumerate(texts[1:4]):
        expected = wrapped.generate(text[None], max_new_tokens=7, **settings)
        assert torch.equal(found[row, -7:], expected[0, -7:])


def test_pipelines_answer_batches_as_one_by_one(tokenizer):
    model = wrapped_model("llama", tokenizer).double()
    tokenizer.pad_token, tokenizer.padding_side = "<eot>", "left"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    answer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["a heron " * count for count in (1, 4, 2)]
    settings = {"max_new_tokens": 5, "do_sample": False}
    together = answer(prompts, batch_size=3, **settings)
    assert together == [answer(prompt, **settings) for prompt in prompts]


@torch.no_grad()
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_batch_of_another_size_is_refused_and_a_padded_one_is_not_saved(wrapped, texts, is_padded, tmp_path):
    ids, mask = padded(texts, "left")
    wrapped(ids, attention_mask=mask if is_padded else None, past_key_values=(memory := wrapped.new_memory()))
    with pytest.raises(UserError, match="the ids are of 2 texts, the memory is of 5"):
        wrapped(ids[:2], past_key_values=memory)
    if is_padded:
        with pytest.raises(UserError, match="has a memory for each length"):
            memory.save(tmp_path / "kept")


@torch.no_grad()
def test_a_batch_that_fails_part_way_is_not_read_on(wrapped, texts):
    ids, mask = padded(texts, "left")
    memory = wrapped.new_memory()
    wrapped(ids, attention_mask=mask, past_key_values=memory)
    hook = fail_at(wrapped, 2)
    more = torch.arange(12 * len(texts)).view(len(texts), 12)
    with pytest.raises(RuntimeError, match="out of memory"):
        wrapped(more, past_key_values=memory)
    hook.remove()
    with pytest.raises(UserError, match=r"read in part: reset\(\)"):
        wrapped(more, past_key_values=memory)
    memory.reset()
    assert torch.equal(
        wrapped(ids, attention_mask=mask, past_key_values=memory).logits,
        wrapped(ids, attention_mask=mask, past_key_values=wrapped.new_memory()).logits,
    )


@pytest.mark.parametrize(
    ("family", "landmarks", "more"), [("llama", "token", 0), ("llama", "none", 0), ("gemma3", "token", 1)]
)
@pytest.mark.parametrize("left_out", [[1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 2, 0, 2, 1, 0, 0]])
def test_padded_texts_pass_through_the_model_together(family, landmarks, more, left_out, tokenizer):
    """Where layers have sliding windows, once for each length, and all chunks but the last together."""
    model = wrapped_model(family, tokenizer, landmarks=landmarks)
    ids, rows = torch.randint(0, 256, (8, 43)), []
    model.model.layers[0].register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    mask = (torch.arange(43) >= torch.tensor(left_out)[:, None]).long()
    settings = {"max_new_tokens": 6, "do_sample": False}
    model.generate(ids, **settings)
    assert rows == [8] * 10
    rows.clear()
    model.generate(ids, attention_mask=mask, **settings)
    passes = 1 + more * (len(set(left_out)) - 1)
    assert sum(rows) == 8 * 10, "each text passes once"
    assert len(rows) == 4 + 6 * passes
