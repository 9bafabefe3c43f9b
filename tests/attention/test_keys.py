"""Keys: their positions, those of the token before, and means of blocks; against plain loops, and with gradients."""

import itertools

import numpy as np
import pytest
import torch

from landmark.attention.keys import Keys, WindowBlocks
from landmark.attention.layout import blocks_and_landmarks
from landmark.attention.rotary import RotaryTable, rotary_factors, rotary_frequencies, rotate
from landmark.utils.constants import channels_of
from tests import oracle


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_pairs_rotate_by_position_and_base_in_layers_with_positions_and_none_is_parted(fraction):
    x, keys = torch.randn(7, 8, dtype=torch.float64), Keys(rope_base=rotary_frequencies(8, 10000.0, fraction))
    for start in (0, 1900):
        expected = [oracle.rotate(x[i].numpy(), start + i, fraction) for i in range(7)]
        np.testing.assert_allclose(rotate(x, keys.rotary(0)(start, 7, x)), np.stack(expected), atol=1e-12)
    assert torch.equal(rotate(x, Keys(unrotated_layers=frozenset({1})).rotary(1)(5, 7, x)), x)
    assert rotate(x.bfloat16(), RotaryTable()(0, 7, x.bfloat16())).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="even head dimension"):
        rotary_factors(torch.arange(2), 5, 10000.0, torch.float32)
    assert [channels_of(fraction, 10) for fraction in (0, 0.25, 0.5, 0.75, 1)] == [0, 2, 4, 8, 10]


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


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("length", [1, 7, 25])
@pytest.mark.parametrize("block_size", [1, 4])
def test_means_in_windows_cut_anywhere_equal_plain_loops(length, block_size, share):
    """Short first blocks, empty ones, incomplete last ones; a memory makes those of complete blocks."""
    phase, width = torch.arange(block_size + 1), block_size + 1
    k = torch.randn(len(phase), 2, length, 4, dtype=torch.float64, requires_grad=True)
    found = WindowBlocks.of(phase, length, block_size, k).add_means(k, share)
    for b, h in itertools.product(range(len(phase)), range(2)):
        expected = oracle.with_means(k[b, h].detach().numpy(), block_size, b, share)
        np.testing.assert_allclose(found[b, h].detach(), expected, atol=1e-12)
    complete = length // width * width
    of_memory = Keys(landmark="mean").with_means(k[0, :, :complete].unflatten(1, (-1, width)), share)
    torch.testing.assert_close(of_memory.flatten(1, 2), found[0, :, :complete])
    assert Keys().with_means(k) is k


def test_gradients_go_to_the_token_before_and_to_every_token_of_a_block():
    def keys(k):
        is_landmark = blocks_and_landmarks(torch.tensor([1]), 6, 3)[1]
        return WindowBlocks.of(torch.tensor([1]), 6, 3, k).add_means(Keys(0.5).shifted(k, is_landmark), 0.7)

    assert torch.autograd.gradcheck(keys, torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True))
