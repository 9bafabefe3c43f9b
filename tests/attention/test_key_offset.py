"""Keys of the normal token before: against a plain loop, over chunks, and with gradients to the right tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention.key_offset import last_channels, offset_keys
from landmark.attention.layout import blocks_and_landmarks
from landmark.utils.channels import channels_of
from tests import naive


@given(
    length=st.integers(1, 25),
    block_size=st.one_of(st.none(), st.integers(1, 6)),
    phases=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    channels=st.sampled_from([0, 2, 4]),
)
@settings(max_examples=100, deadline=None)
def test_windows_equal_a_plain_loop(length, block_size, phases, channels):
    phase = torch.tensor([min(each, block_size or 0) for each in phases])
    k = torch.randn(len(phase), 2, length, 4, dtype=torch.float64)
    is_landmark = None if block_size is None else blocks_and_landmarks(phase, length, block_size)[1]
    out = offset_keys(k, channels, is_landmark)
    for sample, of_heads in enumerate(k):
        for head, keys in enumerate(of_heads):
            expected = naive.offset_keys(keys.numpy(), channels, block_size, int(phase[sample])) if channels else keys
            np.testing.assert_array_equal(out[sample, head], expected)


def test_the_drawing():
    """a b L c d L e: landmarks keep their keys and are passed over."""
    k = torch.arange(7.0).view(1, 1, 7, 1).expand(-1, -1, -1, 2)
    is_landmark = torch.tensor([[False, False, True, False, False, True, False]])
    assert offset_keys(k, 2, is_landmark)[0, 0, :, 0].tolist() == [0, 0, 2, 1, 3, 5, 4]


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [2, 1, 9], [12]])
def test_chunks_of_a_text_without_landmarks_are_the_text(chunks):
    k, previous, parts = torch.randn(1, 2, 12, 6), None, []
    for chunk in k.split(chunks, 2):
        parts.append(offset_keys(chunk, 4, previous=previous))
        previous = last_channels(chunk, 4)
    assert torch.equal(torch.cat(parts, 2), offset_keys(k, 4))


def test_gradients_go_to_the_token_before():
    k = torch.randn(1, 1, 5, 4, requires_grad=True)
    is_landmark = torch.tensor([[False, False, True, False, False]])
    offset_keys(k, 2, is_landmark)[0, 0, 3].sum().backward()
    assert k.grad[0, 0].tolist() == [[0] * 4, [0, 0, 1, 1], [0] * 4, [1, 1, 0, 0], [0] * 4]


def test_channels_are_even_so_that_no_rotated_pair_is_parted():
    assert [channels_of(fraction, 10) for fraction in (0, 0.25, 0.5, 0.75, 1)] == [0, 2, 4, 8, 10]
