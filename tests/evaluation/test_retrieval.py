"""The copy probe against sums by hand; observers of a memory, on the retrievals of real models, against plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from landmark.config.schema import ModelConfig
from landmark.data.evaluation_texts import copies
from landmark.data.stream import Stream
from landmark.evaluation import rows
from landmark.evaluation.retrieval import CELLS, RetrievalMap, distinct
from landmark.evaluation.rows import evaluate, evaluate_copy
from landmark.memory.settings import GRANULARITIES
from landmark.models import Decoder
from landmark.utils.significance import mean_and_error, paired_difference
from tests.configurations import changed
from tests.evaluation.test_perplexity import LANDMARK, PLAIN, TOKENIZER, XL, model_of
from tests.evaluation.test_perplexity import settings as of_text

BLOCK = 5  # of the model LANDMARK
CMT = changed(LANDMARK, cmt=True)


@pytest.fixture
def stream():
    """No token comes twice within 251."""
    return Stream((7 * np.arange(3000) % 251).astype(np.uint16), "")


def settings(length=60, local=None, prompts=6, **given):
    """Of a row. Which memory it gets is up to the model's own configuration."""
    config = of_text(length, local, **given)
    config.size, config.model = "test", ModelConfig(kind="landmark")
    config.eval.prompts, config.eval.task = prompts, "copy"
    return config


@pytest.mark.parametrize(("shape", "local"), [(PLAIN, None), (LANDMARK, 25)])
@torch.no_grad()
def test_losses_of_both_copies_by_hand(shape, local, stream):
    """Each text is read in chunks with a memory of its own, and its last token is not read."""
    model, chunks, seen = model_of(shape), [], []
    hook = model.register_forward_pre_hook(lambda _, given: chunks.append(tuple(given[0].shape)))
    given = settings(60, local, k=1, batch_size=4)
    results = evaluate_copy(model, stream, given, progress=lambda *done: seen.append(done))
    hook.remove()
    assert chunks == [(texts, size) for texts in (4, 2) for size in ([25, 25, 9] if local else [59])]
    assert seen == [(240, 360), (360, 360)]
    first, second = [], []
    for tokens in torch.from_numpy(copies(given.eval, stream)[0]):
        memory = model.new_memory(k=1) if local else None
        logits = torch.cat([model(part[None], memory=memory)[0] for part in tokens[:-1].split(local or 59)])
        for sums, those in zip((first, second), (range(1, 30), range(31, 60)), strict=True):
            sums.append(sum(float(F.cross_entropy(logits[p - 1], tokens[p])) for p in those))
    assert [each[1] for each in results["segments"]] == [29] * 6
    np.testing.assert_allclose([each[2] for each in results["segments"]], second, rtol=1e-4)
    assert results["second_copy"] == results["nll"] == pytest.approx(sum(second) / (6 * 29), rel=1e-5)
    assert results["perplexity"] == pytest.approx(math.exp(results["nll"]))
    assert (results["prompts"], results["tokens"]) == (6, 6 * 29)
    assert results["nll_se"] == pytest.approx(mean_and_error([[0, 29, nats] for nats in second])[1], rel=1e-3)
    assert results["first_copy"] == pytest.approx(sum(first) / (6 * 29), rel=1e-5)
    assert results["first_copy_se"] == pytest.approx(np.std(first, ddof=1) / 29 / math.sqrt(6), rel=1e-3)
    assert results["first_segments"] != results["segments"]
    assert paired_difference(results["segments"], results["first_segments"]).stretches == 6


def test_long_texts_have_cells_of_several_blocks():
    found = RetrievalMap(2 * 5 * CELLS + 2, 10, 5)
    assert found.cell == 15
    assert (found.size - 1) * 15 < 2 * 5 * CELLS + 1 <= found.size * 15


def plain_map(model, texts, config, layer, head, is_weighed):
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
            cutoff=config.cmt.cutoff,
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
                    weight = weight if is_weighed else 1.0
                    sums[token // block, number] += weight
                    right += weight * (number == earlier)
                if token // local > length // 2 // local and earlier < before:
                    counted += 1
                    hits += earlier in chosen
                token += 1
    return sums / queries[:, None], hits / counted, right


class WithoutWeights(RetrievalMap):
    """As with a fused kernel, which tells no weights."""

    def __call__(self, retrieval):
        super().__call__(replace(retrieval, weights=None))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("shape", "length", "local", "blocks", "scorer", "kind"),
    [
        (LANDMARK, 80, 17, None, "landmark", RetrievalMap),
        (LANDMARK, 80, 17, 4, "mean_key", WithoutWeights),
        (LANDMARK, 84, 17, None, "recent", RetrievalMap),
        *((CMT, 84, 43, None, "landmark", kind) for kind in (RetrievalMap, WithoutWeights)),
    ],
)
def test_a_real_map_equals_plain_loops(stream, granularity, shape, length, local, blocks, scorer, kind, monkeypatch):
    """Some queries are below the cutoff, and retrieve nothing, not the first block."""
    monkeypatch.setattr(rows, "RetrievalMap", kind)
    model, config = model_of(shape), settings(length, local, k=3, prompts=3, batch_size=2, blocks=blocks)
    config.retrieval.granularity, config.retrieval.scorer = granularity, scorer
    config.cmt.cutoff, is_weighed = 0.2 if shape is CMT else 0.0, kind is RetrievalMap
    results = evaluate_copy(model, stream, config)
    shown = results["copy_map"]
    assert (0 < results["memory"].get("drop_rate", 0.0) < 1) == (shape is CMT)
    texts = torch.from_numpy(copies(config.eval, stream)[0])
    heads = [(layer, head) for layer in range(2) for head in range(2)]
    expected = {each: plain_map(model, texts, config, *each, is_weighed) for each in heads}
    best, found, right = expected[shown["layer"], shown["head"]]
    assert right == pytest.approx(max(each[2] for each in expected.values()), rel=1e-4)
    np.testing.assert_allclose(shown["best"], best, atol=1e-4)
    assert shown["found"] == pytest.approx(found, abs=1e-4)
    assert (found == 0) == (scorer == "recent" or blocks is not None)
    assert (shown["cell"], shown["share_of"]) == (BLOCK, "attention" if is_weighed else "queries")


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
