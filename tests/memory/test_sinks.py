"""Attention sinks against an explicit softmax over the keys that are still there."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.memory import SinkMemory
from tests import oracle
from tests.memory.reading import feed


def explicit(q, k, v, chunks, sinks, window):
    """q, k, v (T, d), one head, not rotated: every key has a place in the cache, or is masked."""
    out, start = np.zeros_like(q), 0
    for size in chunks:
        stop = start + size
        visible = [j for j in range(stop) if j < sinks or j >= start or j >= max(sinks, start - window)]
        place = {j: number for number, j in enumerate(visible)}
        for i in range(start, stop):
            own = oracle.rotate(q[i], place[i])
            tokens = [(oracle.SCORE(own, oracle.rotate(k[j], place[j])), v[j]) for j in visible if j <= i]
            out[i] = oracle.mean_of(tokens)
        start = stop
    return out


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=40)
def test_sinks_equal_an_explicit_masked_softmax(chunks, sinks, window, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, sum(chunks), 4, dtype=torch.float64, generator=generator) for _ in range(3))
    memory = SinkMemory(window, sinks)
    out = feed(memory, q, k, v, chunks)
    for sample in range(2):
        for head in range(2):
            expected = explicit(*(x[sample, head].numpy() for x in (q, k, v)), chunks, sinks, window)
            np.testing.assert_allclose(out[sample, head], expected, atol=1e-10)
    kept = min(sum(chunks), sinks + window)
    assert memory.stats == {"keys_kept": kept, "bytes_kept": 2 * 2 * 2 * kept * 4 * 8}
    memory.reset()
    assert memory.stats == {"keys_kept": 0, "bytes_kept": 0}


def test_negative_sinks_are_refused():
    with pytest.raises(ValueError, match="sinks"):
        SinkMemory(8, sinks=-1)
