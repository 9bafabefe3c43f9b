"""Attention sinks against an explicit softmax over the keys that are still there."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.memory import SinkMemory
from landmark.models import Decoder, DecoderConfig
from tests import oracle


def explicit(q, k, v, chunks, sinks, window):
    """q, k, v (T, d), one head, not rotated: every key has a place in the cache, or is masked."""
    total, dim = q.shape
    out = np.zeros_like(q)
    start = 0
    for size in chunks:
        stop = start + size
        visible = [j for j in range(stop) if j < sinks or j >= start or j >= max(sinks, start - window)]
        place = {j: number for number, j in enumerate(visible)}
        for i in range(start, stop):
            scores = np.full(total, -np.inf)
            for j in visible:
                if j <= i:
                    scores[j] = oracle.rotate(q[i], place[i]) @ oracle.rotate(k[j], place[j]) / math.sqrt(dim)
            weights = np.exp(scores - scores.max())
            out[i] = weights / weights.sum() @ v
        start = stop
    return out


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(1, 12),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_sinks_equal_an_explicit_masked_softmax(chunks, sinks, window, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, sum(chunks), 4, dtype=torch.float64, generator=generator) for _ in range(3))
    memory, outs, start = SinkMemory(window, sinks), [], 0
    for size in chunks:
        part = slice(start, start + size)
        outs.append(memory.attend(0, q[:, :, part], k[:, :, part], v[:, :, part]))
        memory.commit()
        start += size
    out = torch.cat(outs, 2)
    for sample in range(2):
        for head in range(2):
            expected = explicit(*(x[sample, head].numpy() for x in (q, k, v)), chunks, sinks, window)
            np.testing.assert_allclose(out[sample, head], expected, atol=1e-10)
    assert memory.stats["keys_kept"] == min(sum(chunks), sinks + window)


def test_chunks_with_a_long_window_equal_one_pass():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(320, 2, 2, 8, 32)).eval()
    tokens = torch.randint(0, 256, (2, 60))
    memory = model.new_memory(window=60, sinks=4)
    with torch.no_grad():
        chunks = torch.cat([model(chunk, memory=memory) for chunk in tokens.split(17, 1)], 1)
        torch.testing.assert_close(chunks, model(tokens), atol=1e-4, rtol=1e-4)


def test_memory_does_not_grow_and_starts_anew():
    memory = SinkMemory(8, sinks=2)
    x = torch.randn(1, 2, 100, 4)
    for part in x.split(20, 2):
        memory.attend(0, part, part, part)
        memory.commit()
    assert memory.stats == {"keys_kept": 10, "bytes_kept": 2 * 2 * 10 * 4 * 4}
    memory.reset()
    assert memory.stats == {"keys_kept": 0, "bytes_kept": 0}


def test_plain_transformer_without_a_window_keeps_nothing():
    assert Decoder(DecoderConfig(320, 1, 2, 8, 32)).new_memory() is None


def test_negative_sinks_are_refused():
    with pytest.raises(ValueError, match="sinks"):
        SinkMemory(8, sinks=-1)
