"""The rows of a store grow with its blocks, and the best blocks are found in one pass."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from landmark.memory.select import scores as top_k
from landmark.memory.select.scores import _highest, _top_packed, best_ages
from landmark.memory.store import BlockStore, Store
from landmark.memory.store.block_store import ROWS, SPARE


@pytest.mark.parametrize("tier", ["device", "cpu"])
@pytest.mark.parametrize("max_blocks", [None, 700, 5000])
def test_a_store_reserves_little_more_than_it_holds(max_blocks, tier):
    store = BlockStore(Store(max_blocks, tier, cache=1))
    stored = torch.randn(1, 2, 1000, 4, 2, generator=torch.Generator().manual_seed(0))
    for part in stored.split(3, 2):
        store.add(part, part + 1)
        assert store.capacity <= len(store) * (1 + 1 / SPARE) + ROWS
    kept = min(max_blocks or 1000, 1000)
    rows = store.rows(torch.arange(kept, 0, -1))
    places = torch.cat([rows, rows + store.capacity])
    fetched = store.fetch(places)
    assert torch.equal(fetched.read_keys().unflatten(0, (2, -1)), stored[0, :, -kept:, :-1])
    assert torch.equal(fetched.read_values().unflatten(0, (2, -1)), stored[0, :, -kept:, :-1] + 1)
    assert torch.equal(store.landmarks[0][:, rows], stored[0, :, -kept:, -1])


@given(st.integers(2, 300), st.integers(1, 9), st.integers(0, 5), st.integers(0, 1000))
def test_one_pass_over_integers_finds_the_best_and_of_equal_ones_the_newer(blocks, count, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 2, blocks, generator=generator)
    scores = (scores * steps).round() / 2 if steps else scores  # many ties; 0 and -0 among them
    scores[0, 0, 0] = -torch.inf
    ages, count = torch.randperm(blocks, generator=generator) + 1, min(count, blocks - 1)
    ours, expected = (top(scores, ages, count).sort(-1).values for top in (_top_packed, best_ages))
    assert torch.equal(ours, expected)


@given(st.integers(1, 3000), st.integers(1, 9), st.integers(0, 1000))
def test_two_passes_find_the_highest_scores(blocks, count, seed):
    scores = torch.randn(3, blocks, generator=torch.Generator().manual_seed(seed))
    count = min(count, blocks)
    with mock.patch.object(top_k, "FEW", 0):
        values, indices = _highest(scores, count)
    assert torch.equal(values, scores.sort(-1, descending=True).values[:, :count])
    assert torch.equal(scores.gather(-1, indices), values)


def test_a_store_that_knows_what_comes_reserves_no_more():
    store = BlockStore(Store())
    stored = torch.randn(1, 2, 500, 4, 2, generator=torch.Generator().manual_seed(0))
    store.reserve(500, stored[..., 1:, :])
    for part in stored.split(7, 2):
        store.add(part, part)
    assert store.capacity == len(store) == 500
    store.add(stored[:, :, :1], stored[:, :, :1])
    assert store.capacity >= 500 * (1 + 1 / SPARE)
