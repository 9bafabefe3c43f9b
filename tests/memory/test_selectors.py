"""What each selector is for; that it follows its definition is in test_memory.py, for every pair of settings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from landmark.memory import Memory
from landmark.memory.select import Best, Given, MeanKeys, Newest, Random, SecondLook, scores
from landmark.memory.settings import GRANULARITIES
from tests.memory.reading import feed

WIDTH = 4


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


@pytest.mark.parametrize(
    ("select", "is_alike", "found"),
    [
        (MeanKeys(), True, True),
        (Best(), True, False),
        (Newest(), True, False),
        (MeanKeys(), False, False),
        *((SecondLook(proposed, Best()), False, proposed > 2) for proposed in (2, 8, 9, 1000)),
    ],
)
def test_a_block_is_found_by_its_tokens_where_landmarks_say_nothing(select, is_alike, found):
    """Twelve blocks, the third of which has the value 1; the mean of its keys says what is looked for, or nothing.

    Silent landmarks propose the newest blocks. In the first layer all of them tie.
    """
    q, k, v = torch.zeros(3, 1, 1, 12 * WIDTH, 8, dtype=torch.float64)
    q[..., -2:] = 5.0  # the slowest pair: nearly the same at every position
    of_third = torch.tensor([5.0, 5.0, 5.0] if is_alike else [5.0, -6.0, 0.0])
    k[0, 0, 2 * WIDTH : 2 * WIDTH + 3, -2:] = of_third[:, None].double()
    v[:, :, 2 * WIDTH : 2 * WIDTH + 3, 0] = 1.0
    for layer in (0, 1):
        out = feed(Memory(3, k=1, select=select), q, k, v, [10 * WIDTH, 2 * WIDTH], layer=layer)
        assert bool(out[:, :, 10 * WIDTH :, 0].max() > 0.1) == found


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


@given(st.integers(2, 3000), st.integers(1, 9), st.integers(0, 5), st.integers(0, 1000))
def test_the_best_are_found_and_of_equal_ones_the_newer(blocks, count, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, 2, blocks, generator=generator)
    drawn = (drawn * steps).round() / 2 if steps else drawn  # many ties; 0 and -0 among them
    drawn[0, 0, 0] = -torch.inf
    ages, count = torch.randperm(blocks, generator=generator) + 1, min(count, blocks - 1)
    order = sorted(range(blocks), key=lambda n: (-float(drawn[1, 0, n]), int(ages[n])))
    ours = scores.best_ages(drawn, ages, count).sort(-1).values
    assert ours[1, 0].tolist() == sorted(int(ages[n]) for n in order[:count])
