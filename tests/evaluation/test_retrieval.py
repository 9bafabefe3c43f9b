"""Observers of a memory: retrievals made by hand, and those of real models against plain loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from landmark.data.evaluation_texts import copies
from landmark.evaluation.retrieval import CELLS, RetrievalMap, distinct
from landmark.evaluation.rows import evaluate, evaluate_copy
from landmark.memory.retrievals import Retrieval
from landmark.memory.settings import GRANULARITIES
from landmark.memory.store import BlockStore
from landmark.models import Decoder
from tests.evaluation import test_perplexity
from tests.evaluation.test_perplexity import LANDMARK, PLAIN, TOKENIZER, XL, model_of
from tests.evaluation.test_probes import settings, stream

__all__ = ["stream"]  # a fixture

BLOCK = 5  # of the model LANDMARK


def kept(blocks):
    """A store to which so many blocks were added."""
    store = BlockStore()
    store.added = blocks
    return store


@pytest.mark.parametrize("weights", [True, False])
def test_queries_below_the_cutoff_retrieve_nothing(weights):
    """The second chunk's retrievals of a text of 8 tokens, in blocks of 2 and chunks of 4, with one head.

    Its tokens are 4, 5, a landmark and 6; the last, 7, is not read. Two blocks are in memory. The second and the third
    retrieve: token 5 gives 0.25 of its attention to block 1; the landmark is not counted.
    """
    retrieves = torch.tensor([[[False, True, True, False]]])
    ages = torch.tensor([[2, 1], [0, 1], [2, 1], [0, 1]])
    given = torch.tensor([[0.0, 0.0], [0.0, 0.25], [0.9, 0.1], [0.0, 0.0]])[None, None] if weights else None
    found = RetrievalMap(8, 4, 2)
    found(Retrieval(0, 6, kept(2), ages[None, None], given, retrieves=retrieves))
    shown = found.summary(1)
    assert shown["best"][2:] == [[0, 0.125 if weights else 0.5, 0, 0], [0, 0, 0, 0]]
    assert (shown["found"], shown["share_of"]) == (None, "attention" if weights else "queries")


def test_a_query_that_retrieves_nothing_has_not_found_the_first_block():
    """12 tokens in blocks of 2 and chunks of 7. Tokens 7 to 10 need the blocks 0, 1, 1 and 2."""
    found = RetrievalMap(12, 7, 2)
    ages = torch.tensor([0, 0, 1, 1, 0, 2])[None, None, :, None]  # of token 7, a landmark, 8, 9, a landmark, 10
    found(Retrieval(0, 10, kept(3), ages, torch.where(ages > 0, 0.5, 0.0)))
    assert found.summary(1)["found"] == 0


def test_long_texts_have_cells_of_several_blocks():
    found = RetrievalMap(2 * 5 * CELLS + 2, 10, 5)
    assert found.cell == 15
    assert (found.size - 1) * 15 < 2 * 5 * CELLS + 1 <= found.size * 15


def plain_map(model, texts, config, layer, head):
    """Of a head its map, the share of blocks found, and their weight, by loops over what the observer is told."""
    length, local, block = config.eval.length, config.eval.local, BLOCK
    size = -(-(length - 1) // block)
    sums, queries, hits, counted, right = np.zeros((size, size)), np.zeros(size), 0, 0, 0.0
    for text in texts:
        told = []
        memory = model.new_memory(
            k=config.retrieval.k,
            granularity=config.retrieval.granularity,
            max_blocks=config.memory.blocks,
            scorer=config.retrieval.scorer,
            observer=told.append,
        )
        for start in range(0, length - 1, local):
            told.clear()
            before = start // block
            with torch.no_grad():
                model(text[None, start : min(start + local, length - 1)], memory=memory)
            ages, weights = (each[0, head].tolist() for each in told[layer].per_query())
            token = start
            for place, (each, share) in enumerate(zip(ages, weights, strict=True)):
                if (told[layer].position + place) % (BLOCK + 1) == BLOCK:
                    continue
                queries[token // block] += 1
                earlier = (token - length // 2) // block
                chosen = [before - age for age in each if age]
                for number, weight in zip(chosen, [w for a, w in zip(each, share, strict=True) if a], strict=True):
                    sums[token // block, number] += weight
                    right += weight * (number == earlier)
                if token // local > length // 2 // local and earlier < before:
                    counted += 1
                    hits += earlier in chosen
                token += 1
    return sums / queries[:, None], hits / counted, right


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("length", "local", "blocks", "scorer"),
    [(80, 17, None, "landmark"), (80, 17, 4, "mean_key"), (84, 43, None, "landmark"), (84, 17, None, "recent")],
)
def test_a_real_map_equals_plain_loops(stream, granularity, length, local, blocks, scorer):
    model, config = model_of(LANDMARK), settings(length, local, k=3, prompts=3, batch_size=2, blocks=blocks)
    config.retrieval.granularity, config.retrieval.scorer = granularity, scorer
    shown = evaluate_copy(model, stream, config)["copy_map"]
    texts = torch.from_numpy(copies(config.eval, stream)[0])
    expected = {(layer, head): plain_map(model, texts, config, layer, head) for layer in range(2) for head in range(2)}
    best, found, right = expected[shown["layer"], shown["head"]]
    assert right == pytest.approx(max(each[2] for each in expected.values()), rel=1e-4)
    np.testing.assert_allclose(shown["best"], best, atol=1e-4)
    assert shown["found"] == pytest.approx(found, abs=1e-4)
    assert (found == 0) == (scorer == "recent" or blocks is not None)
    assert (shown["cell"], shown["share_of"]) == (BLOCK, "attention")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_queries_are_counted_for_every_granularity(stream, granularity):
    """As with a fused kernel, which tells no weights: heads or queries that choose together have one set."""
    model, found = model_of(LANDMARK), RetrievalMap(60, 17, 5)
    memory = model.new_memory(
        k=2, granularity=granularity, observer=lambda retrieval: found(replace(retrieval, weights=None))
    )
    for chunk in torch.from_numpy(stream.tokens[:59].astype(np.int64))[None].split(17, 1):
        with torch.no_grad():
            model(chunk, memory=memory)
    shown = found.summary(1)
    assert shown["share_of"] == "queries"
    per_query = np.array(shown["best"]).sum(1)
    np.testing.assert_allclose(per_query, [0, 0, 0, 2 * 3 / 5, *[2] * 8], atol=1e-3)  # chunks begin at 17, 34 and 51


def test_only_rows_that_retrieve_have_a_map_and_only_unique_blocks_statistics_of_keys_moved_once(stream):
    for config, given in (
        (LANDMARK, settings(60)),  # one chunk
        (LANDMARK, settings(60, 17, k=0)),
        (PLAIN, settings(60)),
        (XL, settings(60, 16)),
    ):
        assert "copy_map" not in evaluate_copy(model_of(config), stream, given)
    assert "retrieval" not in evaluate(model_of(LANDMARK), stream, TOKENIZER, of_text(local=20))  # unless asked for
    ages = torch.tensor([[[[1, 2]], [[2, 3]], [[1, 2]], [[1, 2]]]])  # four heads, one set each
    blocks, pairs = distinct(ages, kept=5, kv_heads=2)
    assert (blocks.tolist(), pairs.tolist()) == ([3], [3 + 2])
    assert distinct(ages, kept=5, kv_heads=4)[1].tolist() == [8]


of_text = test_perplexity.settings
LENGTH, LOCAL, K = 64, 20, 3  # chunks of 20, 20, 20 and 4; before the third 8 blocks of 5 are there


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_statistics_equal_plain_loops(stream, granularity):
    config = of_text(length=LENGTH, local=LOCAL, k=K, batch_size=7)
    config.eval.task = "unique_blocks"
    config.retrieval.granularity = granularity
    model, stream = model_of(LANDMARK), replace(stream, tokens=stream.tokens[:600])
    found = evaluate(model, stream, TOKENIZER, config)["retrieval"]
    segments = (len(stream) - 1) // LENGTH
    counts, pairs = np.zeros((2, 9), int), np.zeros(2)
    for segment in range(segments):
        for layer, ages in enumerate(retrieved(model, stream, segment * LENGTH, granularity)):
            heads = 2 if granularity == "per_token" else 1  # heads that choose as one
            blocks, moved = set(), set()
            for head, tokens in enumerate(ages.tolist()):
                for token in tokens:
                    blocks |= set(token)
                    moved |= {(head, block) for block in token}
            counts[layer, len(blocks)] += 1
            pairs[layer] += len(moved) * heads
    assert (found["samples"], found["blocks_cached"]) == (segments, 8)
    assert [layer["distinct_blocks"] for layer in found["layers"]] == counts.tolist()
    bytes_a_pair = 2 * 5 * 8 * 4  # keys and values of 5 tokens, 8 numbers of 4 bytes
    np.testing.assert_allclose([layer["bytes_moved"] for layer in found["layers"]], pairs / segments * bytes_a_pair)
    assert found["bytes_moved"] == pytest.approx(pairs.sum() / segments * bytes_a_pair)
    assert found["bytes_cached"] == 2 * 2 * 8 * bytes_a_pair
    assert found["distinct_blocks"] == pytest.approx((counts @ np.arange(9)).sum() / segments / 2)


def retrieved(model: Decoder, stream, start: int, granularity: str) -> list[torch.Tensor]:
    """Ages (H or 1, T or 1, q) of each layer in the third chunk, fed by hand."""
    seen = []
    memory = model.new_memory(k=K, granularity=granularity, observer=lambda retrieval: seen.append(retrieval.ages[0]))
    tokens = torch.from_numpy(stream.tokens[start : start + 3 * LOCAL].astype(np.int64))[None]
    for chunk in tokens.split(LOCAL, 1):
        seen.clear()
        with torch.no_grad():
            model(chunk, memory=memory)
    return seen
