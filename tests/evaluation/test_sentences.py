"""Which sentences are asked for, what counts as found, and the three rankings."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("bm25s", reason="the optional extra `hf` is not installed")

from landmark.data.named_tokenizers import load_tokenizer
from landmark.data.stream import Stream
from landmark.evaluation.sentences import (
    _bm25,
    _chance,
    _rank,
    document_texts,
    evaluate_sentences,
    sentence_queries,
)
from landmark.models import Decoder
from landmark.retriever import split_into_blocks
from landmark.utils.errors import UserError
from landmark.utils.significance import clopper_pearson
from tests.configurations import decoder_config
from tests.training.training_case import make_config

TOKENIZER = load_tokenizer("bytes")
BLOCK = 50
QUERIES = 12


def made_up(seed):
    """Sentences of words that hardly ever come twice."""
    draw = random.Random(seed)

    def word():
        return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(draw.randint(3, 8)))

    def sentence():
        return " ".join(word() for _ in range(draw.randint(10, 45))).capitalize() + "."

    return [" ".join(sentence() for _ in range(30)) for _ in range(3)]


def stream(texts):
    ids = np.concatenate([np.append(TOKENIZER.encode(text), TOKENIZER.eot) for text in texts]).astype("<u2")
    return Stream(None, ids, "sha", len(texts), 0, 0)  # pyright: ignore[reportArgumentType]


def test_documents_come_back_from_a_stream():
    assert document_texts(stream(made_up(0)), TOKENIZER) == made_up(0)


def test_queries_are_gone_and_first_halves_are_there():
    texts = made_up(1)
    halved = sentence_queries(texts, QUERIES, seed=0)
    assert len(halved.queries) == QUERIES
    for query, (number, start, stop) in zip(halved.queries, halved.places, strict=True):
        document = halved.documents[number][1]
        first = document.encode()[start:stop].decode()
        assert query not in document
        assert first + query in texts[number]
        words = (first + query).split()
        assert 16 <= len(words) <= 40
        assert len(first.split()) == len(words) // 2
    left = sum(len(text) for _, text in halved.documents) + sum(map(len, halved.queries))
    assert left == sum(map(len, texts))
    assert sentence_queries(texts, QUERIES, seed=0) == halved
    assert sentence_queries(texts, QUERIES, seed=1) != halved


@pytest.mark.parametrize("query", ["sentence", "altered"])
def test_whole_sentences_stay_and_are_asked_for(query):
    texts = made_up(1)
    halves, asked = (sentence_queries(texts, QUERIES, 0, kind) for kind in ("second_half", query))
    assert asked.documents == [(str(number), text) for number, text in enumerate(texts)]
    for text, (number, start, stop), half in zip(asked.queries, asked.places, halves.queries, strict=True):
        sentence = texts[number].encode()[start:stop].decode()
        assert sentence.endswith(half)  # of the same sentences
        if query == "sentence":
            assert text == sentence
        else:
            words = half.split() + sentence[: -len(half)].split()
            assert text.split() == [word for number, word in enumerate(words) if number % 3 != 2]


def test_too_few_sentences_are_refused():
    with pytest.raises(UserError, match="has only"):
        sentence_queries(made_up(2), 1000, seed=0)


def test_rank_counts_the_blocks_before_the_best_wanted_one():
    scores = torch.tensor([0.5, 3.0, 1.0, 2.0, 1.0])
    assert _rank(scores, [1]) == 1
    assert _rank(scores, [0, 3]) == 2
    assert _rank(scores, [2]) == 4  # an equal one stands before it


def test_chance_is_that_of_drawing():
    draw = np.random.default_rng(0)
    drawn = [set(draw.choice(40, 10, replace=False)) & {3, 17} for _ in range(4000)]
    assert _chance(40, 2, 10) == pytest.approx(np.mean([bool(hit) for hit in drawn]), abs=0.03)
    assert _chance(40, 1, 1) == pytest.approx(1 / 40)


def test_bm25_prefers_the_block_with_the_words():
    score = _bm25(["herons stand in water", "schooners have masts", "water runs downhill"])
    assert int(score("a schooners two masts").argmax()) == 1


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder(decoder_config("landmark", 320, 2, 2, 8, 32, landmark_id=257, block_size=BLOCK))


def evaluated(model, retriever, query="second_half"):
    config = make_config("landmark")
    config = replace(config, eval=replace(config.eval, retriever=retriever, prompts=QUERIES, query=query))
    streams = {"validation": stream(made_up(3)), "test": stream(made_up(4))}
    return evaluate_sentences(model, streams, TOKENIZER, config)


@pytest.mark.parametrize("retriever", ["landmark", "tokens", "bm25"])
def test_recall_counts_the_ranks(model, retriever):
    results = evaluated(model, retriever)
    assert len(results["ranks"]) == results["prompts"] == QUERIES
    for n in (1, 10):
        hits = sum(rank <= n for rank in results["ranks"])
        assert results[f"recall_at_{n}"] == hits / QUERIES
        assert results[f"recall_at_{n}_interval"] == list(clopper_pearson(hits, QUERIES))
    halved = sentence_queries(made_up(4), QUERIES, seed=7)
    assert results["blocks"] == sum(math.ceil(len(text.encode()) / BLOCK) for _, text in halved.documents)
    assert (results["heads"] is None) == (retriever == "bm25")


def test_wanted_blocks_hold_the_first_half(model, monkeypatch):
    """A ranking that knows the place is always right."""
    halved = sentence_queries(made_up(4), QUERIES, seed=7)
    texts = [block for document in halved.documents for block in split_into_blocks(*document, TOKENIZER, BLOCK)[0]]
    firsts = {
        q: halved.documents[n][1].encode()[a:b] for q, (n, a, b) in zip(halved.queries, halved.places, strict=True)
    }

    def knowing(_):
        return lambda query: torch.tensor([float(block.text.strip().encode() in firsts[query]) for block in texts])

    monkeypatch.setattr("landmark.evaluation.sentences._bm25", knowing)
    results = evaluated(model, "bm25")
    found = [
        rank for rank, query in zip(results["ranks"], halved.queries, strict=True) if len(firsts[query]) > 2 * BLOCK
    ]
    assert found
    assert set(found) == {1}


def test_whole_sentences_are_found_where_they_stand(model):
    """BM25 finds words that hardly ever come twice; with the second half removed it finds other blocks."""
    found = {kind: evaluated(model, "bm25", kind)["ranks"] for kind in ("second_half", "sentence", "altered")}
    assert found["sentence"] == [1] * QUERIES
    assert np.median(found["altered"]) == 1
    assert np.median(found["second_half"]) > 10


def test_chance_needs_no_model(model):
    results = evaluated(model, "chance")
    assert 0 < results["recall_at_1"] < results["recall_at_10"] < 1
    assert "ranks" not in results
