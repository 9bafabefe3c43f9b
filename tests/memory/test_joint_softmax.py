"""A memory in which a part of each block's log-sum-exp is in its gate; plain loops are in test_memory.py."""

import pytest
import torch

from landmark.attention import landmark_attention
from landmark.memory import Memory
from landmark.utils.errors import UserError
from tests.memory.test_landmark_values import read

BLOCK = 3
LENGTH, CHUNK = 9 * (BLOCK + 1), 7


@pytest.mark.parametrize("granularity", ["per_token_and_head", "per_head"])
@pytest.mark.parametrize(("tier", "share"), [("device", 1.0), ("device", 0.5), ("disk", 0.5)])
def test_with_all_blocks_a_memory_reads_as_a_window(tier, share, granularity):
    q, k, v = torch.randn(3, 2, 2, LENGTH, 8, dtype=torch.float64)
    settings = {"rope_base": torch.zeros(4), "tier": tier, "granularity": granularity}  # no channel turns
    expected = landmark_attention(q, k, v, block_size=BLOCK, joint_softmax=share)
    out = read(Memory(BLOCK, k=9, joint_softmax=share, **settings), q, k, v, CHUNK)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    assert (read(Memory(BLOCK, k=9, **settings), q, k, v, CHUNK) - expected).abs().amax() > 0.01


@pytest.mark.parametrize("settings", [{}, {"rerank": 6}, {"granularity": "per_head"}, {"max_blocks": 5}])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_fused_kernels_read_the_same(settings, share):
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16)
    out, expected = (
        read(Memory(BLOCK, k=2, joint_softmax=share, backend=backend, **settings), q, k, v, CHUNK)
        for backend in ("triton", "blockwise")
    )
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)


def test_a_second_look_then_takes_the_blocks_that_weigh_most():
    """With one block of all: no other choice of a block would leave the rest less weight."""
    q, k, v = torch.randn(3, 1, 1, LENGTH, 8, dtype=torch.float64)
    weights = []
    for rerank in (None, 100):
        memory = Memory(BLOCK, k=1, joint_softmax=1, rerank=rerank, rope_base=torch.zeros(4))
        memory.observer = lambda retrieval: weights.append(retrieval.weights)
        read(memory, q, k, v, CHUNK)
    half = len(weights) // 2
    landmarks, second = (torch.cat([x for x in some if x.numel()], 2) for some in (weights[:half], weights[half:]))
    assert (second >= landmarks - 1e-12).all()
    assert (second > landmarks + 1e-3).any()


def test_a_saved_memory_knows_it(tmp_path):
    memory = Memory(BLOCK, joint_softmax=0.5)
    read(memory, *torch.randn(3, 1, 1, LENGTH, 8), CHUNK)
    memory.save(tmp_path / "saved")
    Memory(BLOCK, joint_softmax=0.5).load(tmp_path / "saved")
    with pytest.raises(UserError, match=r"model.joint_softmax=0.5, here it is 0.0"):
        Memory(BLOCK).load(tmp_path / "saved")


def test_what_makes_landmarks_gates_is_refused():
    for name, value in (("fan_out", 2), ("landmark_values", True)):
        with pytest.raises(UserError, match=f"model.joint_softmax=0.5: goes without model.{name}"):
            Memory(BLOCK, joint_softmax=0.5, **{name: value})
    with pytest.raises(ValueError, match="leave out the context miss token"):
        Memory(BLOCK, joint_softmax=0.5).attend(0, *torch.randn(3, 1, 2, 5, 8), cmt=torch.randn(2, 8))
