"""Keys: those of the token before, and means of blocks; against plain loops, over chunks, and with gradients."""

import itertools
import math

import numpy as np
import pytest
import torch

from landmark.attention import Grouped, Window, landmark_attention
from landmark.attention.keys import Keys, WindowBlocks, bias_landmarks
from landmark.attention.layout import blocks_and_landmarks
from landmark.utils.constants import channels_of
from tests import oracle


@pytest.mark.parametrize("block_size", [None, 1, 3, 6])
@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("offset", [0.0, 0.5, 1.0])
def test_offset_keys_of_windows_cut_anywhere_equal_a_plain_loop(length, block_size, offset):
    phase = torch.arange(1 if block_size is None else block_size + 1)
    k = torch.randn(len(phase), 2, length, 4, dtype=torch.float64)
    is_landmark = None if block_size is None else blocks_and_landmarks(phase, length, block_size)[1]
    out = Keys(offset).shifted(k, is_landmark)
    for sample, head in itertools.product(range(len(phase)), range(2)):
        expected = oracle.offset_keys(k[sample, head].numpy(), channels_of(offset, 4), block_size, sample)
        np.testing.assert_array_equal(out[sample, head], expected)


def test_the_drawing():
    """a b L c d L e: landmarks keep their keys and are passed over."""
    k = torch.arange(7.0).view(1, 1, 7, 1).expand(-1, -1, -1, 2)
    is_landmark = torch.tensor([[False, False, True, False, False, True, False]])
    assert Keys(1.0).shifted(k, is_landmark)[0, 0, :, 0].tolist() == [0, 0, 2, 1, 3, 5, 4]


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [2, 1, 9], [12]])
def test_chunks_of_a_text_without_landmarks_are_the_text(chunks):
    keys, k, previous, parts = Keys(0.5), torch.randn(1, 2, 12, 8), None, []
    for chunk in k.split(chunks, 2):
        parts.append(keys.shifted(chunk, previous=previous))
        previous = keys.last(chunk)
    assert torch.equal(torch.cat(parts, 2), keys.shifted(k))
    assert Keys().last(k) is None


def test_gradients_go_to_the_token_before():
    k = torch.randn(1, 1, 5, 4, requires_grad=True)
    is_landmark = torch.tensor([[False, False, True, False, False]])
    Keys(0.5).shifted(k, is_landmark)[0, 0, 3].sum().backward()
    assert k.grad[0, 0].tolist() == [[0] * 4, [0, 0, 1, 1], [0] * 4, [1, 1, 0, 0], [0] * 4]


def test_channels_are_even_so_that_no_rotated_pair_is_parted():
    assert [channels_of(fraction, 10) for fraction in (0, 0.25, 0.5, 0.75, 1)] == [0, 2, 4, 8, 10]


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("length", [1, 7, 25])
@pytest.mark.parametrize("block_size", [1, 4])
def test_means_in_windows_cut_anywhere_equal_plain_loops(length, block_size, share):
    """Short first blocks, empty ones, incomplete last ones."""
    phase = torch.arange(block_size + 1)
    k = torch.randn(len(phase), 2, length, 4, dtype=torch.float64)
    found = WindowBlocks.of(phase, length, block_size, k).add_means(k, share)
    for b, h in itertools.product(range(len(phase)), range(2)):
        np.testing.assert_allclose(found[b, h], oracle.with_means(k[b, h].numpy(), block_size, b, share), atol=1e-12)


def test_means_of_complete_blocks_are_those_of_a_window():
    k = torch.randn(2, 3, 4 * 6, 8, dtype=torch.float64)
    of_window = WindowBlocks.of(torch.zeros(2, dtype=torch.int64), 24, 5, k).add_means(k, 0.5)
    blocks = k.unflatten(2, (-1, 6))
    torch.testing.assert_close(Keys(landmark="mean").with_means(blocks, 0.5).flatten(2, 3), of_window)
    assert Keys().with_means(blocks) is blocks


def test_means_carry_gradients_to_every_token_of_the_block():
    k = torch.randn(1, 1, 6, 2, requires_grad=True)
    WindowBlocks.of(torch.tensor([1]), 6, 3, k).add_means(k)[0, 0, 2, 0].backward()
    assert k.grad[0, 0, :, 0].tolist() == [0.5, 0.5, 1, 0, 0, 0]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("score", [0.0, 1.5])
def test_with_equal_scores_it_is_full_attention(share, score):
    """A landmark with the mean, a bias of log ℓ and no key of its own weighs as much as its tokens, whatever α is."""
    block_size, length = 3, 12
    is_landmark = (torch.arange(length) + 1) % (block_size + 1) == 0
    q, k = torch.zeros(2, 1, 1, length, 8, dtype=torch.float64)
    q[..., 0], k[..., 0], v = 1, 8**0.5 * score * ~is_landmark, torch.randn(1, 1, length, 8, dtype=torch.float64)
    bias = (1 - share) * math.log(block_size) * torch.ones(1, dtype=torch.float64)
    q, k = bias_landmarks(q, k, is_landmark[None], bias)
    k = WindowBlocks.of(torch.zeros(1, dtype=torch.int64), length, block_size, k).add_means(k, 1 - share)
    out, _ = landmark_attention(q, k, v, Window(block_size), gate=Grouped(share))
    means = v[:, :, ~is_landmark].cumsum(2) / torch.arange(1, 10)[:, None]  # of all tokens before, weighed alike
    torch.testing.assert_close(out[:, :, ~is_landmark], means)


def test_layers_may_have_no_positions():
    keys, x = Keys(unrotated_layers=frozenset({1})), torch.randn(1, 1, 3, 4, dtype=torch.float64)
    from landmark.attention.rotary import rotate

    assert torch.equal(rotate(x, keys.rotary(1)(5, 3, x)), x)
    assert not torch.equal(rotate(x, keys.rotary(0)(5, 3, x)), x)
