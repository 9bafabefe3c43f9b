"""Texts beside each other and one after the other: each is read as if it were alone, and none is read twice."""

import copy
import logging
import pickle
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import pipeline

from landmark.models.huggingface import PrefixCache
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import FREE, fail_at, read, wrapped_model

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


# ---- texts that begin alike are read once, and a live memory is used by the model that made it alone


GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def text():
    return torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))


def counted(model):
    """Tokens that the model reads from now on, call by call."""
    calls = []
    model.register_forward_pre_hook(
        lambda _, given, named: calls.append((given[0] if given else named["input_ids"]).shape[1]), with_kwargs=True
    )
    return calls


@pytest.mark.parametrize("settings", [{}, FREE], ids=["landmarks", "without"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_was_read_is_not_read_again(family, settings, text):
    """Answers are those of reading all: the same text, one that goes on, and one that differs in the middle."""
    model = wrapped_model(family, **settings)
    prefixes, expected = PrefixCache(model), model.generate(text, **GREEDY)
    calls = counted(model)
    first = prefixes.generate(text, **GREEDY)
    assert torch.equal(first, expected)
    assert sum(calls) == 60 + 5
    calls.clear()
    assert torch.equal(prefixes.generate(text, **GREEDY), expected)
    in_blocks = settings is FREE
    whole = 56 if in_blocks else 54  # the last whole block, or chunk, before the token whose logits are wanted
    assert sum(calls) == 60 - whole + 5
    longer = torch.cat([first, text[:, :11]], 1)
    memory = model.new_memory()
    model.generate(text, past_key_values=memory, **GREEDY)
    expected = model.generate(longer, past_key_values=memory, **GREEDY)
    calls.clear()
    assert torch.equal(prefixes.generate(longer, **GREEDY), expected)
    assert sum(calls) == 1 + 11 + 5, "the last token of an answer is not read before"
    edited = longer.clone()
    edited[0, 40] = (edited[0, 40] + 1) % 256
    expected = model.generate(edited, **GREEDY)
    calls.clear()
    assert torch.equal(prefixes.generate(edited, **GREEDY), expected)
    assert sum(calls) == 77 - (40 if in_blocks else 36) + 5
    changed = longer.clone()
    changed[0, 70] = (changed[0, 70] + 1) % 256
    at_blocks = in_blocks and family == "llama"  # a text without landmarks or windows is whole at each block's end
    assert prefixes.longest(changed[0].tolist()) == (68 if at_blocks else 64 if in_blocks else 65)


def test_least_recently_used_memories_go_first_and_what_an_error_has_torn_at_once(text, caplog):
    model = wrapped_model("llama")
    prefixes = PrefixCache(model)
    texts = [torch.roll(text, number, 1) for number in range(4)]
    for each in texts[:2]:
        prefixes.generate(each, **GREEDY)
    prefixes.most_bytes = sum(kept.cache.nbytes for kept in prefixes._kept) * 3  # of three: one that goes on takes more
    for each in (texts[2], texts[0], texts[3]):
        prefixes.generate(each, **GREEDY)
    assert [prefixes.longest(each[0].tolist()) > 50 for each in texts] == [True, False, True, True]
    prefixes.most_bytes = 1
    caplog.clear()  # whatever level an earlier command has set
    with caplog.at_level(logging.INFO):
        for each in (texts[2], text):
            prefixes.generate(each, **GREEDY)
            assert [len(prefixes._kept), prefixes.longest(each[0].tolist()) > 50] == [1, True], "the last one stays"
    assert caplog.text.count("a text of 65 tokens will be read again when it is asked about") == 4
    # Of the second chunk: the first one was read.
    prefixes = PrefixCache(model := wrapped_model("llama"))
    fail_at(model, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        prefixes.generate(text, **GREEDY)
    assert not prefixes._kept
    prefixes.generate(text, **GREEDY)


def test_memories_of_others_are_not_used_and_those_in_use_are_copied(text):
    model, ids = wrapped_model("gemma3"), text[0].tolist()
    prefixes = PrefixCache(model)
    with prefixes.using(ids, "me") as mine:
        read(model, text[:, :54], mine, 9)
        with prefixes.using(ids, "me") as copied, prefixes.using(ids, "you") as other:
            assert copied is not mine
            assert [each.get_seq_length() for each in (mine, copied, other)] == [54, 54, 0]
            found, expected = (read(model, text[:, 54:], each) for each in (copied, mine))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_live_memory_of_another_model_is_refused(family, text):
    """Even an empty one: it has the layers and frequencies of its model."""
    model, other = wrapped_model(family), wrapped_model(family, seed=1)
    memory = model.new_memory()
    with pytest.raises(UserError, match="the memory is of another model"):
        other(text, past_key_values=memory)
    read(model, text, memory)
    with pytest.raises(UserError, match="the memory is of another model"):
        other.generate(torch.cat([text, text], 1), past_key_values=memory)
    with pytest.raises(UserError, match="the memory is of another model"):
        other(text[:, :1], past_key_values=memory)

    def check_changed():
        with pytest.raises(UserError, match="weights or the adapter have changed since it began"):
            read(model, text, memory)
        memory.reset()
        read(model, text, memory)

    with torch.no_grad():
        model.get_input_embeddings().weight[0] += 1
    check_changed()
    settings = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["k_proj"])
    adapted = get_peft_model(model, settings, "A")
    check_changed()
    adapted.add_adapter("B", settings)
    adapted.set_adapter("B")
    check_changed()
    adapted.merge_adapter()
    check_changed()
    adapted.unmerge_adapter()
    with adapted.disable_adapter():
        check_changed()


def test_a_changed_model_reads_texts_anew(text):
    """Nothing is taken from before: by the prefix cache, by the one token that `generate` reads, by a padded batch."""
    model = wrapped_model("llama", **FREE)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    prefixes, memory, padded = PrefixCache(adapted), model.new_memory(), model.new_memory()
    prefixes.generate(text, **GREEDY)
    assert prefixes.longest(text[0].tolist()) > 0
    read(model, text[:, :-1], memory)
    batch, mask = text.expand(2, -1), torch.ones(2, 60, dtype=torch.int64)
    mask[0, :9] = 0
    with torch.no_grad():
        model(batch, attention_mask=mask, past_key_values=padded)
    with adapted.disable_adapter():
        assert prefixes.longest(text[0].tolist()) == 0
        assert torch.equal(prefixes.generate(text, **GREEDY), model.generate(text, **GREEDY))
        for call, given, past in ((model.generate, text, memory), (model, batch, padded)):
            with pytest.raises(UserError, match="weights or the adapter have changed since it began"):
                call(given, past_key_values=past)


@pytest.mark.parametrize("settings", [{}, FREE], ids=["landmarks", "without"])
def test_a_memory_that_is_not_loaded_stays_as_it_was(settings, text, tmp_path):
    model, other = wrapped_model("gemma3", **settings), wrapped_model("gemma3", seed=1, **settings)
    memory, same = model.new_memory(), model.new_memory()
    for each in (memory, same):
        read(model, text, each)
    kept = other.new_memory()
    read(other, text, kept)
    kept.save(tmp_path / "other")
    with pytest.raises(UserError, match="another model: .*merging an adapter changes the weights"):
        memory.load(tmp_path / "other")
    assert torch.equal(memory.ids, same.ids)
    assert torch.equal(read(model, text, memory), read(model, text, same))


@pytest.mark.parametrize("settings", [{}, FREE], ids=["landmarks", "without"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_copies_and_pickles_of_a_memory_hold_no_model(family, settings, text):
    model = wrapped_model(family, **settings)
    cache, weights = model.new_memory(), sum(x.nbytes for x in model.parameters())
    model.generate(text, past_key_values=cache, **GREEDY)
    expected = model.generate(torch.cat([cache.ids, text[:, :7]], 1), **GREEDY)
    pickled = pickle.dumps(cache)
    assert len(pickled) < min(weights, 2 * cache.nbytes + 50_000)
    for copied in (copy.deepcopy(cache), copy.deepcopy(copy.deepcopy(cache)), pickle.loads(pickled)):
        assert copied.nbytes == cache.nbytes
        whole = torch.cat([copied.ids, text[:, :7]], 1)
        if settings:  # with landmarks chunks show
            assert torch.equal(model.generate(whole, past_key_values=copied, **GREEDY), expected)
        else:
            model.generate(whole, past_key_values=copied, **GREEDY)
    other = wrapped_model(family, seed=1, **settings)
    with pytest.raises(UserError, match="of another model"):
        other.generate(torch.cat([cache.ids, text[:, :7]], 1), past_key_values=pickle.loads(pickled), **GREEDY)
