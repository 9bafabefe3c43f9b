"""Blocks with the best landmarks are looked at again; plain loops are in test_memory.py."""

import itertools
import math

import pytest
import torch

from landmark.memory import Memory
from landmark.memory.block_store import BlockStore
from landmark.memory.positions import scoring_lag
from landmark.memory.query_tiles import QueryTiles
from landmark.memory.rerank import rerank
from landmark.utils.errors import UserError

WIDTH = 4


def hidden_token():
    """Twelve blocks, one of which has a single token that the last queries look for; the others hide it from a mean."""
    q, k, v = torch.zeros(3, 1, 1, 12 * WIDTH, 8, dtype=torch.float64)
    q[..., -2:] = 5.0  # the slowest pair: nearly the same at every position
    k[:, :, 2 * WIDTH, -2:] = 5.0
    k[:, :, 2 * WIDTH + 1, -2:] = -6.0
    v[:, :, 2 * WIDTH, 0] = 1.0
    return q, k, v


@pytest.mark.parametrize("tie_layers", [(), (1,)])
@pytest.mark.parametrize(("rerank", "found"), [(None, False), (2, False), (8, True), (9, True), (1000, True)])
def test_a_block_is_found_by_its_tokens(rerank, found, tie_layers):
    """Landmarks that say nothing propose the newest blocks; the block is the third of ten."""
    memory, length = Memory(3, k=1, rerank=rerank, tie_layers=tie_layers), 10 * WIDTH
    q, k, v = hidden_token()
    memory.attend(1, *(x[:, :, :length] for x in (q, k, v)))
    memory.commit()
    out = memory.attend(1, *(x[:, :, length:] for x in (q, k, v)))
    assert (out[..., 0].max() > 0.1) == found


@pytest.mark.parametrize("sizes", [None, (2, 5, 1, 4, 3, 5, 2, 1)])
def test_it_equals_plain_loops_where_blocks_end_early(sizes):
    """In a ring that has dropped two of eight blocks, for heads that share keys; empty places do not count."""
    added, kept, k, slots = 8, 6, 2, 3
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, added, 6, 8, dtype=torch.float64, generator=generator)
    queries = torch.randn(slots, 2, 3, 4, 8, dtype=torch.float64, generator=generator)
    store = BlockStore(kept)
    for part in (slice(0, 5), slice(5, added)):
        store.add(keys[:, :, part], keys[:, :, part], None if sizes is None else torch.tensor(sizes)[part])
    ages = torch.arange(kept, 0, -1).expand(2, 4, 3, kept)
    places = rerank(QueryTiles(queries, store, ages, scoring_lag(ages, k, slots)), k, None)
    for b, h, t in itertools.product(range(2), range(4), range(3)):
        scores = {}
        for age in range(1, kept + 1):
            query = queries[(age if age <= k else slots) - 1, b, t, h]
            *tokens, landmark = keys[b, h // 2, added - age]
            mass = sum(math.exp(query @ key) for key in tokens[: None if sizes is None else sizes[added - age]])
            scores[age] = float(query @ landmark) + math.log(mass)
        best = sorted(sorted(scores, key=scores.__getitem__)[-k:], reverse=True)
        assert ages[b, h, t, places[b, h, t]].tolist() == best


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rerank": 3}, "retrieval.rerank=3 is less than retrieval.k=4"),
        ({"rerank": 4.5}, "retrieval.rerank=4.5: must be a whole number"),
        ({"rerank": 8, "granularity": "per_head"}, "retrieval.granularity=per_head: retrieval.rerank=8 chooses among"),
        ({"rerank": 8, "scorer": "recent"}, "retrieval.scorer=recent: retrieval.rerank=8 chooses among"),
        ({"rerank": 32, "index": "faiss"}, "memory.candidates=16 is less than retrieval.rerank=32"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Memory(3, k=4, **settings)


def read(chunks=(30, 10, 7), **settings):
    torch.manual_seed(0)
    memory, outs = Memory(3, k=2, **settings), []
    for length in chunks:
        outs.append(memory.attend(1, *torch.randn(3, 2, 2, length, 8, dtype=torch.float64).unbind(0)))
        memory.commit()
    return torch.cat(outs, 2)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_every_tier_finds_the_same(tier, tmp_path):
    folder = {"folder": tmp_path} if tier == "disk" else {}
    on_device = read(rerank=5)
    torch.testing.assert_close(read(rerank=5, tier=tier, **folder), on_device, atol=0, rtol=0)
    assert not torch.allclose(on_device, read())


@pytest.mark.parametrize("settings", [{}, {"fan_out": 2}, {"fan_out": 2, "levels": 2}, {"mapping": "true"}])
def test_as_many_proposals_as_blocks_that_are_retrieved_change_nothing(settings):
    torch.testing.assert_close(read(rerank=2, **settings), read(**settings), atol=0, rtol=0)


def test_groups_propose_by_their_descent():
    """Where the descent proposes every block, its gates and the tokens decide, so more proposals change nothing."""
    every = read(fan_out=2, rerank=20)
    torch.testing.assert_close(read(fan_out=2, rerank=40), every, atol=0, rtol=0)
    assert not torch.allclose(every, read(fan_out=2))
