"""The scorer `given`: the blocks that are named are retrieved, whatever landmarks say."""

import pytest
import torch

from landmark.evaluation.recall import evidence_blocks
from landmark.memory import Memory


def read(memory, chunks=(30, 10)):
    torch.manual_seed(0)
    for length in chunks:
        memory.attend(0, *torch.randn(3, 2, 2, length, 8).unbind(0))
        memory.commit()


@pytest.mark.parametrize(("granularity", "heads", "queries"), [("per_token_and_head", 2, 10), ("per_head", 2, 1)])
def test_given_blocks_come_first_then_the_newest(granularity, heads, queries):
    seen = []
    memory = Memory(4, k=3, granularity=granularity, scorer="given", observer=lambda each: seen.append(each.ages))
    memory.given = torch.tensor([[1, -1], [0, 5]])
    read(memory)
    ages = seen[-1]  # of six blocks: block number n has age 6 − n
    assert ages.shape == (2, heads, queries, 3)
    assert (ages[0] == torch.tensor([5, 2, 1])).all()
    assert (ages[1] == torch.tensor([6, 2, 1])).all()  # block 5 is the newest itself


def test_blocks_that_are_not_stored_do_not_count():
    seen = []
    memory = Memory(4, k=2, scorer="given", observer=lambda each: seen.append(each.ages))
    memory.given = torch.tensor([[9], [9]])
    read(memory)
    assert (seen[-1] == torch.tensor([2, 1])).all()


def test_without_blocks_nothing_is_guessed():
    with pytest.raises(RuntimeError, match="set the memory's `given`"):
        read(Memory(4, k=2, scorer="given"))


def test_blocks_of_evidence():
    blocks = evidence_blocks([[(0, 3), (49, 51)], [], [(100, 150)]], 50)
    assert blocks.tolist() == [[0, 1], [-1, -1], [2, -1]]
