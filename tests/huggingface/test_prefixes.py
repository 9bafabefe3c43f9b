"""Texts that begin alike are read once, and a live memory is used by the model that made it alone."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from landmark.huggingface import PrefixCache
from landmark.utils.errors import UserError
from tests.huggingface.conftest import FREE, fail_at, read, wrapped_model

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
    in_tiles = settings is FREE  # chunks end where tiles do, the last one before the token whose logits are wanted
    assert sum(calls) == (1 if in_tiles else 60 - 54) + 5, "from the last whole chunk on"
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
    assert sum(calls) == 77 - (40 if in_tiles else 36) + 5
    changed = longer.clone()
    changed[0, 70] = (changed[0, 70] + 1) % 256
    anywhere = in_tiles and family == "llama"  # a text without landmarks or windows is whole at each token
    assert prefixes.longest(changed[0].tolist()) == (70 if anywhere else 65), "where the text went on before"


def test_least_recently_used_memories_go_first_and_what_an_error_has_torn_at_once(text):
    model = wrapped_model("llama")
    prefixes = PrefixCache(model)
    texts = [torch.roll(text, number, 1) for number in range(4)]
    for each in texts[:2]:
        prefixes.generate(each, **GREEDY)
    prefixes.most_bytes = sum(kept.cache.nbytes for kept in prefixes._kept) * 3  # of three: one that goes on takes more
    for each in (texts[2], texts[0], texts[3]):
        prefixes.generate(each, **GREEDY)
    assert [prefixes.longest(each[0].tolist()) > 50 for each in texts] == [True, False, True, True]
    prefixes.most_bytes = 0
    prefixes.generate(text, **GREEDY)
    assert not prefixes._kept
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
