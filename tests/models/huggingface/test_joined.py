"""Texts that were read alone and are asked together, against the model's own attention in float64."""

import copy
from itertools import accumulate

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from landmark.models.huggingface import PrefixCache, joined, wrap
from landmark.models.huggingface.prefixes import Saved
from landmark.models.huggingface.tiny import doubled
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import EAGER, make_model, read
from tests.models.huggingface.test_kinds import model_of_kind

FEW = {"k": 3, "window": 7, "dense": 60}  # a text alone is read with all keys, several together with a few blocks
PARTS = (37, 41, 33)
# Each way to turn keys, layers without positions, windows, sinks and a cap, and what cannot follow another text.
ROTATIONS = "llama", "llama3", "llama_yarn", "gemma2", "gemma3", "smollm3", "gpt_oss", "gpt_neox", "llama4_text"


@pytest.fixture(autouse=True)
def exact():
    """Rotations too, which models compute in float32."""
    with doubled():
        yield


def make(family, tokenizer, memory=FEW):
    model = make_model(family, "eager" if family in EAGER else "sdpa").double()
    plain = copy.deepcopy(model)
    return wrap(model, tokenizer, landmarks="none", block_size=5, local=17, memory=memory), plain


@pytest.fixture
def texts():
    return torch.randint(0, 256, (1, sum(PARTS) + 20), generator=torch.Generator().manual_seed(1)).split(
        [*PARTS, 20], 1
    )


def memory_of(model, ids):
    """That has read a text as a document is read: its last logits are asked for."""
    memory = model.new_memory()
    with torch.no_grad():
        model(ids, past_key_values=memory, logits_to_keep=1)
    return memory


@pytest.mark.parametrize("name", ROTATIONS)
def test_keys_are_those_of_a_text_alone_that_begins_where_the_one_before_ends(name, texts, tokenizer):
    wrapped, plain = make(name, tokenizer)
    if name == "llama4_text":  # its layers beside keep chunks
        with pytest.raises(UserError, match="several memories: .* cannot follow"):
            joined(memory_of(wrapped, each) for each in texts[:2])
        return
    memory = joined(memory_of(wrapped, each) for each in texts[:3])
    assert memory.starts == (0, 37, 78)
    assert memory.get_seq_length() == sum(PARTS)
    own = [DynamicCache(config=plain.config) for _ in PARTS]
    for start, ids, cache in zip(memory.starts, texts[:3], own, strict=True):
        with torch.no_grad():
            plain(ids, past_key_values=cache, position_ids=torch.arange(start, start + ids.shape[1])[None])
    for number, layer in enumerate(memory.layers):
        for kind in ("keys", "values"):
            expected = torch.cat([getattr(each.layers[number], kind) for each in own], 2)[0]
            if number in memory.landmark_layers:
                found = getattr(memory.memory.layers[number], kind)[:, : sum(PARTS)]
            else:
                found = getattr(layer, kind)[0]
                expected = expected[:, -found.shape[1] :]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def by_hand(model, texts, block, window, k, dense):
    """Logits of the last text, whose queries see the last tokens and k blocks of all; the others see themselves."""
    length, starts = sum(each.shape[1] for each in texts), [0, 37, 78]
    asking = length - texts[-1].shape[1]

    def seen(keys, own, query, scaling, means, slides):
        if query < asking:
            start = max(each for each in starts if each <= query)
            return [*range(max(start, query - slides + 1) if slides else start, query + 1)]
        if slides:
            return [*range(query - slides + 1, query + 1)]
        if query < dense:
            return [*range(query + 1)]
        far = max(0, query // block * block - window) // block
        best = (own @ means[:far].T * scaling).softmax(-1).amax(0).argsort(descending=True)
        blocks = [0, *[n for n in best.tolist() if n][: k - 1]]
        return [n * block + i for n in blocks for i in range(block)] + [*range(far * block, query + 1)]

    def attention(module, q, keys, values, mask, scaling, **_):
        out, group, slides = torch.zeros_like(q), q.shape[1] // keys.shape[1], getattr(module, "sliding_window", None)
        means = keys[0, :, : length // block * block].unflatten(1, (-1, block)).mean(2)
        for kv, query in torch.cartesian_prod(torch.arange(keys.shape[1]), torch.arange(length)).tolist():
            heads = slice(kv * group, (kv + 1) * group)
            own = q[0, heads, query]
            tokens = seen(keys, own, query, scaling, means[kv], slides)
            out[0, heads, query] = (own @ keys[0, kv, tokens].T * scaling).softmax(-1) @ values[0, kv, tokens]
        return out.transpose(1, 2), None

    AttentionInterface.register("by_hand", attention)
    model.set_attn_implementation("by_hand")
    with torch.no_grad():
        return model(torch.cat(texts, 1)).logits[:, asking:]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_question_reads_chosen_blocks_of_all_texts(name, texts, tokenizer):
    wrapped, plain = make(name, tokenizer)
    memory = joined(memory_of(wrapped, each) for each in texts[:3])
    found = read(wrapped, texts[3], memory, parts=7)
    expected = by_hand(plain, texts, block=5, window=10, k=3, dense=60)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    after = read(wrapped, torch.cat(texts, 1))[:, -20:]
    assert (found - after).abs().max() > 0.01  # than in one text, whose later parts know the earlier ones


@pytest.mark.parametrize("dense", [0, 60])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_one_alone_stays_what_it_is_and_answers_do_not_depend_on_others(name, dense, texts, tokenizer, tmp_path):
    """Bit for bit: in a memory that goes on, in a copy from a mark, and in one that was saved."""
    wrapped, _ = make(name, tokenizer, FEW | {"dense": dense})

    def asked(memory, question):
        with torch.no_grad():
            return wrapped(question, past_key_values=memory, logits_to_keep=1).logits

    def begun(memory):
        memory.marks = []
        memory.settle()
        memory.add_mark()
        return memory

    alone = [memory_of(wrapped, texts[0]) for _ in range(2)]
    assert torch.equal(asked(joined(alone[:1]), texts[3]), asked(alone[1], texts[3]))
    first, second = texts[3].split(10, 1)
    parts = [memory_of(wrapped, each) for each in texts[:3]]
    untouched = [copy.deepcopy(each.memory.layers[2].keys) for each in parts]
    memory, fresh = begun(joined(parts)), joined(parts)
    fresh.save(tmp_path / "all")
    (loaded := wrapped.new_memory()).load(tmp_path / "all")
    expected = asked(fresh, second)
    asked(memory, first)
    fork = memory.fork(memory.mark_before(sum(PARTS)))
    rest = torch.cat(texts[:3], 1)[:, fork.get_seq_length() :]
    torch.testing.assert_close(asked(fork, torch.cat([rest, second], 1)), expected, rtol=0, atol=1e-12)
    assert loaded.ends == fresh.ends == (37, 78, 111)
    assert torch.equal(asked(loaded, second), expected)
    for each, before in zip(parts, untouched, strict=True):
        assert torch.equal(each.memory.layers[2].keys, before)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_texts_alone_are_known_again_only_as_a_whole(name, texts, tokenizer):
    """Not where another text follows the first one, nor where one of them goes on: those are joined anew. Neither is
    read in order where its memory was dropped.
    """
    wrapped, _ = make(name, tokenizer)
    first, second, third, question = texts
    longer = torch.cat([second, third[:, :9]], 1)
    for most in (None, 1):
        prefixes = PrefixCache(wrapped, most)
        for parts in ([first, second], [first, third], [first, longer], [first, second], [first], [first, second]):
            ids, loaded = torch.cat([*parts, question], 1)[0].tolist(), []
            ends = tuple(accumulate(each.shape[1] for each in parts)) if len(parts) > 1 else ()

            def load(parts=parts, loaded=loaded):
                loaded.append(parts)
                return joined(memory_of(wrapped, each) for each in parts)

            with prefixes.using(ids, saved=Saved(len(ids) - 20, ends, load)) as cache:
                assert cache.ends == ends
                rest = torch.tensor([ids[cache.get_seq_length() :]])
                found = wrapped(rest, past_key_values=cache, logits_to_keep=1).logits
            (fresh := load()).settle()
            expected = wrapped(question, past_key_values=fresh, logits_to_keep=1).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert (len(loaded) > 1) == bool(most)
    replaced = Saved(len(ids) - 20, (37, 78), lambda: joined(memory_of(wrapped, each) for each in (first, third)))
    with pytest.raises(UserError, match="was replaced meanwhile"), PrefixCache(wrapped).using(ids, saved=replaced):
        pass


@pytest.mark.parametrize("kind", ["granitemoehybrid", "olmo_hybrid", "lfm2"])
def test_states_and_convolutions_cannot_follow_those_of_another_text(kind, tokenizer):
    model = wrap(model_of_kind(kind), tokenizer, landmarks="none", block_size=5)
    ids = torch.arange(20)[None]
    with pytest.raises(
        UserError, match=f"^several memories: {kind} has layers .* cannot follow those of another text$"
    ):
        joined(memory_of(model, ids) for _ in range(2))


def test_what_cannot_be_asked_together(texts, tokenizer):
    wrapped, _ = make("llama", tokenizer)
    one, empty = memory_of(wrapped, texts[0]), wrapped.new_memory()
    landmarks = memory_of(other := wrap(make_model("llama").double(), tokenizer, block_size=5), texts[0])
    for others, said in (([landmarks], "without landmarks"), ([empty], "one text"), ([], "there is none")):
        with pytest.raises(UserError, match=f"several memories: .*{said}"):
            joined(others)
    (settled := joined([one, one])).settle()
    with pytest.raises(UserError, match=r"several memories: .* \(settle\)"):
        joined([settled, one])
    other = memory_of(make("llama", tokenizer)[0], texts[1])
    with pytest.raises(UserError, match="of different models"):
        joined([one, other])
    half = memory_of(wrapped, texts[1])
    for layer in half.memory.layers.values():
        layer.keys = layer.keys.half()
    with pytest.raises(UserError, match="different types .*float16, torch.float64"):
        joined([one, half])
