"""Queries below the cutoff of the context miss token are not searched for, and read no blocks."""

import pytest
import torch

from landmark.attention import ContextMiss
from landmark.memory.select import selector
from landmark.memory.settings import GRANULARITIES
from landmark.memory.store import BlockStore
from tests.memory.reading import feed, new_memory, texts


@pytest.fixture
def counting(monkeypatch):
    """Counts every read of a block's keys and values, or landmark, and every scan of all landmarks."""
    counts = {"reads": 0, "scans": 0}

    def count(owner, name, what, times):
        original = getattr(owner, name)

        def counted(*arguments):
            counts[what] += times(*arguments)
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(BlockStore, "fetch", "reads", lambda store, places: 2 * len(places))
    count(BlockStore, "read_landmarks", "reads", lambda store, places: len(places))
    count(selector, "best_of_summaries", "scans", lambda *_: 1)
    return counts


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_single_queries_and_chunks_below_the_cutoff_are_left_out(counting, granularity):
    """The token's key points along some queries and away from others, so it is known which queries retrieve."""
    q, k, v, _ = texts(60, (4, 4), dtype=torch.float64)
    q[..., -2:] = -50.0  # the slowest pair: about the same at every position
    q[:, :, 40:, -2:] = 0.0
    q[0, 1, 20:27, -2:] = 50.0
    q[1, 3, 22, -2:] = 50.0
    k[..., -2:] = 0.0
    cmt, seen = torch.zeros(4, 4, dtype=torch.float64), []
    cmt[:, -2:] = 5.0
    memory = new_memory(k=2, granularity=granularity, cutoff=0.99, observer=seen.append)
    feed(memory, q, k, v, [20, 20, 20], extra=ContextMiss(cmt))
    stats = memory.stats
    assert (stats["lookups"], stats["searches"], stats["searches_skipped"], counting["scans"]) == (8, 2, 1, 1)
    assert (stats["dropped"], stats["possible"]) == ([[80, 73, 80, 79]], [[80] * 4])
    assert stats["drop_rates"] == [[1.0, 73 / 80, 1.0, 79 / 80]]
    assert stats["drop_rate"] == pytest.approx(1 - 8 / 320)
    assert 0 < counting["reads"] <= 3 * 2 * 8, "at most the blocks of eight queries: keys, values and landmark"
    assert stats["retrievals"] == (2 if granularity == "per_head" else 8)
    assert sum(int((each.ages > 0).sum()) for each in seen) == stats["blocks_retrieved"]
    assert sum(int((each.per_query()[0] > 0).any(-1).sum()) for each in seen) == stats["lookups"]


@pytest.mark.parametrize("cutoff", [0.0, 1.0])
def test_a_cutoff_of_zero_drops_nothing_and_one_of_one_all(cutoff):
    q, k, v, cmt = texts(60, (4, 4), dtype=torch.float64)
    memory = new_memory(k=2, cutoff=cutoff)
    for part in (slice(0, 30), slice(30, 60)):
        for layer in (0, 1):
            memory.attend(layer, q[:, :, part], k[:, :, part], v[:, :, part], ContextMiss(cmt))
        memory.commit()
    assert memory.stats["drop_rates"] == [[cutoff] * 4] * 2
    assert (memory.stats["skipped"], memory.stats["lookups"]) == (cutoff, (1 - cutoff) * 2 * 2 * 4 * 30)
