"""What each selector is for; that it follows its definition is in test_memory.py, for every pair of settings."""

import pytest
import torch

from landmark.attention import Grouped
from landmark.attention.keys import Keys
from landmark.evaluation.recall import evidence_blocks
from landmark.memory import Memory
from landmark.memory.select import Best, Given, MeanKeys, Newest, Random, SecondLook
from landmark.memory.settings import GRANULARITIES
from landmark.memory.store import Store
from tests.memory.reading import feed

WIDTH = 4


def silent(dim=8):
    """Twelve blocks with silent landmarks; the tokens of the third, whose values are 1, are what queries look for."""
    q, k, v = torch.zeros(3, 1, 1, 12 * WIDTH, dim, dtype=torch.float64)
    q[..., -2:] = 5.0  # the slowest pair: nearly the same at every position
    k[:, :, 2 * WIDTH : 2 * WIDTH + 3, -2:] = 5.0
    v[:, :, 2 * WIDTH : 2 * WIDTH + 3, 0] = 1.0
    return q, k, v


def finds(select, texts, layer=1, tail=2 * WIDTH):
    q, k, v = texts
    out = feed(Memory(3, k=1, select=select), q, k, v, [q.shape[2] - tail, tail], layer=layer)
    return bool(out[:, :, -tail:, 0].max() > 0.1)


def test_equal_scores_are_taken_by_recency():
    """All landmarks the same and all at one slot: the newest of the old win, at every granularity."""
    for granularity in GRANULARITIES:
        q = torch.randn(1, 2, 30, 4, dtype=torch.float64)
        k, v = torch.randn(2, 1, 2, 30, 4, dtype=torch.float64)
        k[:, :, 2::3] = 0.0  # every landmark scores 0 for every query
        newest = feed(Memory(2, k=1, select=Newest(granularity)), q, k, v, [15, 15])
        for store in (Store(), Store(max_blocks=1)):
            memory = Memory(2, k=1, select=Best(granularity, ()), store=store)
            torch.testing.assert_close(feed(memory, q, k, v, [15, 15]), newest)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", [Newest, Random, MeanKeys])
def test_ablations_choose_other_blocks_and_the_same_every_time(kind, granularity):
    q, k, v = torch.randn(3, 2, 2, 120, 8, dtype=torch.float64)
    first, again, landmark = (
        feed(Memory(3, k=2, select=select), q, k, v, [40, 40, 40])
        for select in (kind(granularity), kind(granularity), Best(granularity))
    )
    torch.testing.assert_close(first, again, atol=0, rtol=0)
    assert not torch.allclose(first, landmark)


def test_mean_keys_find_a_block_whose_landmark_is_silent():
    for select, found in ((MeanKeys(), True), (Best(), False), (Newest(), False)):
        assert finds(select, silent()) == found


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("proposed", "found"), [(2, False), (8, True), (9, True), (1000, True)])
def test_a_second_look_finds_a_block_by_one_of_its_tokens(proposed, found, layer):
    """Landmarks that say nothing propose the newest blocks; the block is the third of ten; its mean says nothing."""
    q, k, v = silent()
    k[:, :, 2 * WIDTH + 1, -2:] = -6.0
    k[:, :, 2 * WIDTH + 2] = 0.0
    assert not finds(MeanKeys(), (q, k, v))
    assert finds(SecondLook(proposed, Best()), (q, k, v), layer) == found


def test_as_many_proposals_as_blocks_that_are_retrieved_change_nothing():
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    plain, looked = (feed(Memory(3, k=2, select=s), q, k, v, [40, 20]) for s in (Best(), SecondLook(2, Best())))
    torch.testing.assert_close(looked, plain, atol=0, rtol=0)


def test_a_second_look_then_takes_the_blocks_that_weigh_most():
    """With α = 1 and one block of all: no other choice of a block would leave the rest less weight."""
    q, k, v = torch.randn(3, 1, 1, 36, 8, dtype=torch.float64)
    weights = []
    for select in (Best(), SecondLook(100, Best())):
        seen = []
        keys = Keys(rope_base=torch.zeros(4))
        memory = Memory(3, k=1, select=select, keys=keys, gate=Grouped(1.0), observer=seen.append)
        feed(memory, q, k, v, [7] * 5 + [1])
        weights.append(torch.cat([each.weights for each in seen if each.weights.numel()], 2))
    landmarks, second = weights
    assert (second >= landmarks - 1e-12).all()
    assert (second > landmarks + 1e-3).any()


@pytest.mark.parametrize(("granularity", "heads", "queries"), [("per_token_and_head", 2, 10), ("per_head", 2, 1)])
def test_given_blocks_come_first_then_the_newest(granularity, heads, queries):
    seen, (q, k, v) = [], torch.randn(3, 2, 2, 40, 8)
    select = Given(granularity, torch.tensor([[1, -1], [0, 5]]))
    feed(Memory(4, k=3, select=select, observer=lambda each: seen.append(each.ages)), q, k, v, [30, 10], layer=0)
    ages = seen[-1]  # of six blocks: block number n has age 6 − n
    assert ages.shape == (2, heads, queries, 3)
    assert (ages[0] == torch.tensor([5, 2, 1])).all()
    assert (ages[1] == torch.tensor([6, 2, 1])).all()  # block 5 is the newest itself
    select.numbers = torch.tensor([[9], [9]])  # blocks that are not stored do not count
    feed(Memory(4, k=2, select=select, observer=lambda each: seen.append(each.ages)), q, k, v, [30, 10])
    assert (seen[-1] == torch.tensor([2, 1])).all()
    with pytest.raises(RuntimeError, match="set its `numbers`"):
        feed(Memory(4, select=Given()), q, k, v, [30, 10])


def test_blocks_of_evidence():
    blocks = evidence_blocks([[(0, 3), (49, 51)], [], [(100, 150)]], 50)
    assert blocks.tolist() == [[0, 1], [-1, -1], [2, -1]]


def test_the_newest_blocks_may_be_kept_beside_the_best():
    q, k, v = torch.randn(3, 1, 2, 90, 8)
    seen = []
    select = Best(newest=2)
    feed(Memory(3, k=3, select=select, observer=lambda each: seen.append(each.ages)), q, k, v, [60, 30])
    assert (seen[-1][..., -2:] == torch.tensor([2, 1])).all()
    assert (seen[-1][..., 0] > 2).all()
    assert seen[-1][..., 0].unique().numel() > 3
