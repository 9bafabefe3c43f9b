"""Retrievals of real models against plain loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from landmark.evaluation.retrieval import distinct
from landmark.evaluation.rows import evaluate
from landmark.memory.settings import GRANULARITIES
from landmark.models import Decoder
from tests.evaluation import test_perplexity
from tests.evaluation.test_perplexity import LANDMARK, TOKENIZER, model_of
from tests.evaluation.test_probes import stream

__all__ = ["stream"]  # a fixture

BLOCK = 5  # of the model LANDMARK


def test_only_unique_blocks_have_statistics(stream):
    assert "retrieval" not in evaluate(model_of(LANDMARK), stream, TOKENIZER, of_text(local=20))  # unless asked for


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


def test_shared_keys_are_moved_once():
    ages = torch.tensor([[[[1, 2]], [[2, 3]], [[1, 2]], [[1, 2]]]])  # four heads, one set each
    blocks, pairs = distinct(ages, kept=5, kv_heads=2)
    assert (blocks.tolist(), pairs.tolist()) == ([3], [3 + 2])
    assert distinct(ages, kept=5, kv_heads=4)[1].tolist() == [8]
