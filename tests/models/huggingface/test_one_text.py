"""The logits after a text depend on the text: not on the calls in which it came, nor on what was read before it."""

from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from landmark.models.huggingface import PrefixCache, wrap
from landmark.models.huggingface.tiny import VOCABULARY, doubled
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering, finished
from tests.models.huggingface.test_kinds import KINDS, model_of_kind
from tests.models.huggingface.test_training_free import make

BLOCK, LENGTH = 5, 63
READINGS = [("llama", 0), ("llama", 37), ("gemma3", 0), ("gemma3", 37)]  # dense: blocks are chosen from there on
READINGS += [("qwen3_next", 37), ("falcon_h1", 0), ("gemma4_text", 0)]  # with states, or keys of an earlier layer


@pytest.fixture(params=READINGS, ids=lambda each: f"{each[0]}-dense{each[1]}")
def wrapped(request, tokenizer):
    (family, dense), settings = request.param, {"local": 4 * BLOCK}
    settings["memory"] = {"k": 3, "window": 7, "dense": dense}
    if family not in KINDS:
        yield make(family, tokenizer, **settings)[0].eval()
    else:
        with doubled():
            model = model_of_kind(family, bos_token_id=None, eos_token_id=None, pad_token_id=None)
            yield wrap(model, tokenizer, landmarks="none", block_size=BLOCK, **settings)


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (1, LENGTH + 17), generator=torch.Generator().manual_seed(1))


def after(model, ids, cache=None, stops=None):
    """Logits of the token that follows; the ids are what the memory has not read yet."""
    cache = model.new_memory() if cache is None else cache
    with torch.no_grad():
        for start, stop in pairwise([0, *(stops or [ids.shape[1]])]):
            *_, (_, logits) = model.read_text(ids[:, start:stop], cache, kept=int(stop == ids.shape[1]))
    return logits[0, -1]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [1, 7, 24, 1000])
def test_sizes_of_calls_do_not_show(wrapped, ids, size):
    text = ids[:, :LENGTH]
    with torch.no_grad():
        expected = wrapped(text, past_key_values=wrapped.new_memory(), logits_to_keep=1).logits[0, -1]
    same(after(wrapped, text, stops=[*range(size, LENGTH, size), LENGTH]), expected)
    same(after(wrapped, text), expected)
    if size == 1:
        return  # a caller that wants the logits of each token gets them without tiles
    cache = wrapped.new_memory()
    with torch.no_grad():
        for part in text.split(size, 1):
            logits = wrapped(part, past_key_values=cache, logits_to_keep=1).logits[0, -1]
    if LENGTH % size != 1:
        same(logits, expected)


@pytest.mark.parametrize("parted", range(43, 43 + BLOCK))
def test_a_question_before_does_not_show(wrapped, ids, parted):
    """The second text begins as the first one, whose answer was generated, and parts from it at any place."""
    first, prefixes = ids[:, :LENGTH], PrefixCache(wrapped)
    prefixes.generate(first, max_new_tokens=7, do_sample=False)
    second = torch.cat([first[:, :parted], ids[:, LENGTH:]], 1)
    with prefixes.using(second[0].tolist()) as cache:
        read = cache.get_seq_length()
        assert 0 < read <= parted
        found = after(wrapped, second[:, read:], cache)
    same(found, after(wrapped, second))


def test_going_on_behind_an_answer_does_not_show(wrapped, ids, tmp_path):
    """As in a chat: the memory has read the answer token by token, a new one reads it with the text behind it."""
    first, prefixes = ids[:, :LENGTH], PrefixCache(wrapped)
    answered = prefixes.generate(first, max_new_tokens=12, do_sample=False)
    whole = torch.cat([answered, ids[:, LENGTH:]], 1)
    expected = after(wrapped, whole)
    (kept,) = prefixes._kept
    kept.cache.save(tmp_path / "memory")
    read = kept.cache.get_seq_length()
    assert read == answered.shape[1] - 1  # the last token of an answer is not read
    loaded, again = wrapped.new_memory(), wrapped.new_memory()
    loaded.load(tmp_path / "memory")
    loaded.settle()
    loaded.save(tmp_path / "settled")  # with tokens that are not read
    again.load(tmp_path / "settled")
    for cache in (loaded, again, kept.cache):  # a call with tokens that are known settles the memory itself
        same(after(wrapped, whole[:, read:], cache), expected)
        assert torch.equal(cache.ids, whole)


def test_a_client_that_left_does_not_show(wrapped, ids):
    prefixes = PrefixCache(wrapped)
    text = ids[:, :LENGTH]
    with prefixes.using(text[0].tolist()) as cache, torch.no_grad():
        steps = wrapped.read_text(text, cache)
        next(steps)
        stop, _ = next(steps)
        steps.close()
    with prefixes.using(ids[0].tolist()) as cache:
        assert cache.get_seq_length() == stop
        found = after(wrapped, ids[:, stop:], cache)
    same(found, after(wrapped, ids))


def test_generation_goes_on_as_from_a_new_memory(wrapped, ids):
    """transformers' own `generate`, twice with one memory, against the whole text at once."""
    settings, cache = {"max_new_tokens": 9, "do_sample": False}, wrapped.new_memory()
    answered = wrapped.generate(ids[:, :LENGTH], past_key_values=cache, **settings)
    whole = torch.cat([answered, ids[:, LENGTH : LENGTH + 1]], 1)
    found = wrapped.generate(whole, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **settings)
    new = wrapped.generate(whole, output_logits=True, return_dict_in_generate=True, **settings)
    assert torch.equal(found.sequences, new.sequences)
    same(torch.stack(found.logits), torch.stack(new.logits))


def test_an_error_while_unread_tokens_are_read_loses_nothing(wrapped, ids, monkeypatch):
    cache = wrapped.new_memory()
    answered = wrapped.generate(ids[:, :LENGTH], past_key_values=cache, max_new_tokens=9, do_sample=False)
    read, more = cache.get_seq_length(), ids[:, LENGTH:]
    whole = torch.cat([answered[:, :read], more], 1)
    with monkeypatch.context() as patch:
        patch.setattr(cache.memory, "attend_in", Mock(side_effect=RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            after(wrapped, more, cache, stops=[more.shape[1]])
    assert torch.equal(cache.ids, answered[:, :read])
    same(after(wrapped, more, cache), after(wrapped, whole))


@pytest.mark.parametrize("length", [LENGTH // BLOCK * BLOCK, LENGTH])
def test_a_question_of_one_token_reads_the_end_of_a_text_again(wrapped, ids, tokenizer, tmp_path, length):
    answering, before, loaded = Answering(wrapped, tokenizer), wrapped.new_memory(), wrapped.new_memory()
    finished(answering.read(ids[:, :length], before))
    before.save(tmp_path / "memory")
    loaded.load(tmp_path / "memory")
    expected = after(wrapped, ids[:, : length + 1])
    for cache in (before, loaded):
        same(finished(answering.read(ids[:, length : length + 1], cache))[0], expected)


def test_all_ways_to_answer_give_one_answer(wrapped, ids, tokenizer):
    """transformers' `generate`, and the answers of commands, chat, server and harness, also after other questions."""
    text, answering = ids[:, :LENGTH], Answering(wrapped, tokenizer)
    answering.ends = set()
    wrapped.generation_config.eos_token_id = None
    expected = wrapped.generate(text, max_new_tokens=8, do_sample=False)[0, LENGTH:].tolist()

    def answer(asked, cache):
        steps = answering.steps([asked], cache, Sampling(temperature=0.0), 8)
        return [step[0] for step in steps if isinstance(step, list)]

    asked = text[0].tolist()
    assert answer(asked, wrapped.new_memory()) == expected
    for other in ([*asked[:50], *ids[0, LENGTH:].tolist()], asked, [*asked, *expected, *asked[:9]], asked):
        with answering.prefixes.using(other) as cache:
            found = answer(other, cache)
        if other == asked:
            assert found == expected
