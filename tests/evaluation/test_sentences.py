"""Which sentences are asked for, what counts as found, and the rankings."""

import functools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("bm25s", reason="the optional extra `hf` is not installed")

from landmark.attention.rotary import RotaryTable, rotate
from landmark.data import Stream, load_tokenizer
from landmark.evaluation import sentences
from landmark.evaluation.sentences import WINDOW, _rank, asked_blocks, evaluate_sentences, scorer
from landmark.memory import Memory
from landmark.models import Decoder
from landmark.utils.errors import UserError
from landmark.utils.significance import clopper_pearson
from tests.configurations import decoder_config
from tests.training.training_case import make_config

TOKENIZER = load_tokenizer("bytes")
BLOCK = 50
QUERIES = 12


def made_up(seed):
    """Sentences of words that hardly ever come twice, with letters of one to four bytes."""
    draw = random.Random(seed)

    def word():
        return "".join(draw.choice("abcdefghijklmnopqrstuvwxyzé蒼🪶") for _ in range(draw.randint(3, 8)))

    def sentence():
        return " ".join(word() for _ in range(draw.randint(10, 45))).capitalize() + "."

    return [" ".join(["A first one.", *(sentence() for _ in range(18))]) for _ in range(3)]


def stream(texts, tokenizer=TOKENIZER):
    ids = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eot) for text in texts]).astype("<u2")
    return Stream(ids, "")


def asking(ranker="landmark", prompts=QUERIES):
    config = make_config("landmark")
    return replace(config, eval=replace(config.eval, task=f"rank_by_{ranker}", prompts=prompts))


def test_sentences_stand_once_in_their_text_and_are_drawn_by_the_seed():
    texts, config = made_up(1), asking()
    asked = asked_blocks(stream(texts), TOKENIZER, config, BLOCK).queries
    assert len(asked) == QUERIES
    for sentence in asked:
        assert sum(text.count(sentence) for text in texts) == 1
        assert 16 <= len(sentence.split()) <= 40
    assert asked_blocks(stream(texts), TOKENIZER, config, BLOCK).queries == asked
    assert asked_blocks(stream(texts), TOKENIZER, replace(config, seed=1), BLOCK).queries != asked
    with pytest.raises(UserError, match="has only"):
        asked_blocks(stream(texts), TOKENIZER, asking(prompts=1000), BLOCK)
    scores = torch.tensor([0.5, 3.0, 1.0, 2.0, 1.0])
    assert _rank(scores, [1]) == 1
    assert _rank(scores, [0, 3]) == 2
    assert _rank(scores, [2]) == 4  # an equal one stands before it


@pytest.mark.parametrize("block_size", [1, 3, 50])
def test_blocks_cut_no_character_and_those_wanted_hold_the_place(block_size):
    """Tokens are bytes here: a block may end within a character, which then belongs to the last of its blocks."""
    asked = asked_blocks(stream(made_up(1)), TOKENIZER, asking(), block_size)
    texts = iter(asked.texts)
    for text, ids in zip(made_up(1), asked.ids, strict=True):
        length = len(text.encode())
        assert len(ids) == -(-length // block_size) * block_size
        assert ids[:length].tolist() == list(text.encode())
        assert set(ids[length:]) <= {TOKENIZER.eot}
        blocks = [next(texts) for _ in range(len(ids) // block_size)]
        assert "".join(blocks) == text
        behind = np.arange(1, len(blocks)) * block_size - np.cumsum([len(block.encode()) for block in blocks[:-1]])
        assert set(behind) <= {0, 1, 2, 3}
    assert next(texts, None) is None
    for query, wanted in zip(asked.queries, asked.wanted, strict=True):
        found = "".join(asked.texts[number] for number in wanted)
        assert query in found
        assert all(asked.texts[number] for number in (wanted[0], wanted[-1]))
        assert query not in found.removeprefix(asked.texts[wanted[0]])
        assert query not in found.removesuffix(asked.texts[wanted[-1]])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = decoder_config("landmark", 320, 2, 4, 8, 32, num_kv_heads=2, landmark_id=257, block_size=BLOCK)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model


def heard(model, ids):
    """The queries and keys of each layer."""
    memory, inputs = Memory(BLOCK, k=0), {}
    attend = memory.attend
    memory.attend = lambda layer, *qkv, **given: inputs.setdefault(layer, qkv[:2]) and attend(layer, *qkv, **given)
    model(torch.from_numpy(ids)[None], memory=memory)
    return inputs


@pytest.mark.parametrize("at_once", [1 << 25, 1])
@pytest.mark.parametrize("of_tokens", [False, True], ids=["landmark", "tokens"])
def test_scores_are_softmaxes_over_blocks(model, of_tokens, at_once, monkeypatch):
    """Put together by hand: each landmark, or each token, stands in the block just before the text."""
    monkeypatch.setattr(sentences, "AT_ONCE", at_once)
    asked = asked_blocks(stream(made_up(1)), TOKENIZER, asking(prompts=2), BLOCK)
    text, table, kept = asked.queries[0], RotaryTable(), {}
    places = range(BLOCK) if of_tokens else [BLOCK]
    for ids in asked.ids:
        for start in range(0, len(ids), WINDOW * BLOCK):
            for layer, (_, keys) in heard(model, ids[start : start + WINDOW * BLOCK]).items():
                of_blocks = keys[0].unflatten(1, (-1, BLOCK + 1))
                turned = [rotate(of_blocks[:, :, place], table(place, 1, keys)) for place in places]
                kept.setdefault(layer, []).append(torch.stack(turned, 2))
    expected = {}
    for layer, (queries, _) in heard(model, TOKENIZER.encode(text).astype(np.int64)).items():
        keys = torch.cat(kept[layer], 1)
        queries = rotate(queries[0], table(BLOCK + 1, queries.shape[2], queries))
        for head in range(4):
            scores = torch.einsum("td,bnd->tbn", queries[head], keys[head // 2]) / math.sqrt(8)
            weights = scores.exp().sum(-1)
            expected[layer, head] = (weights / weights.sum(-1, keepdim=True)).log().mean(0)
    found = scorer(model, TOKENIZER, of_tokens, asked.ids)(text)
    assert found.keys() == expected.keys()
    for head in expected:
        torch.testing.assert_close(found[head], expected[head])
    some = scorer(model, TOKENIZER, of_tokens, asked.ids, [(1, 2), (0, 3)])(text)
    assert list(some) == [(1, 2), (0, 3)]


@functools.cache
def evaluated(model, ranker):
    streams = {"validation": stream(made_up(3)), "test": stream(made_up(4))}
    return evaluate_sentences(model, streams, TOKENIZER, asking(ranker))


@pytest.mark.parametrize("retriever", ["landmark", "tokens", "bm25"])
def test_recall_counts_the_ranks(model, retriever):
    results = evaluated(model, retriever)
    assert len(results["ranks"]) == results["prompts"] == QUERIES
    found = sum(rank <= 10 for rank in results["ranks"])
    assert results["accuracy"] == found / QUERIES
    assert (results["accuracy_low"], results["accuracy_high"]) == clopper_pearson(found, QUERIES)
    assert results["blocks"] == sum(math.ceil(len(text.encode()) / BLOCK) for text in made_up(4))
    assert (results["heads"] is None) == (retriever == "bm25")
    assert (results["ranks"] == [1] * QUERIES) == (retriever == "bm25")  # finds words that hardly ever come twice


def test_the_best_heads_are_chosen_on_the_validation_split(model):
    """Their sum ranks the wanted blocks higher there than the best head alone, and than all heads."""
    asked = asked_blocks(stream(made_up(3)), TOKENIZER, asking(), BLOCK)
    by_head = scorer(model, TOKENIZER, False, asked.ids)
    found = [by_head(query) for query in asked.queries]

    def distance(heads):
        sums = [sum(scores[head] for head in heads) for scores in found]
        return sum(math.log(_rank(each, wanted)) for each, wanted in zip(sums, asked.wanted, strict=True))

    heads = [tuple(head) for head in evaluated(model, "landmark")["heads"]]
    best = distance(heads)
    assert best <= min(distance([head]) for head in found[0])
    assert best <= distance(found[0])
    there = asked_blocks(stream(made_up(4)), TOKENIZER, asking(), BLOCK)
    by_best = scorer(model, TOKENIZER, False, there.ids, heads)
    means = [sum(by_best(query).values()) / len(heads) for query in there.queries]
    assert [_rank(*each) for each in zip(means, there.wanted, strict=True)] == evaluated(model, "landmark")["ranks"]


def test_chance_is_that_of_drawing_and_needs_no_model(model):
    results, draw = evaluated(model, "chance"), np.random.default_rng(0)
    asked = asked_blocks(stream(made_up(4)), TOKENIZER, asking(), BLOCK)
    drawn = [set(draw.choice(len(asked.texts), 10, replace=False)) for _ in range(400)]
    hits = [bool(each & set(wanted)) for each in drawn for wanted in asked.wanted]
    assert results["accuracy"] == pytest.approx(np.mean(hits), abs=0.03)
    assert "ranks" not in results
