"""Blocks that end early: their empty places take no part, against plain loops and finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import landmark_attention
from landmark.attention.key_offset import offset_keys
from landmark.attention.landmark_keys import WindowBlocks, add_summaries

BACKENDS = ["reference", "blockwise"]


def cut(sizes, block_size, phase, length):
    """The number of its block, and "token", "empty" or "landmark", of each place of a window.

    sizes: tokens of each block of the text. The window begins at place `phase` of the first one.
    """
    places = []
    for number, size in enumerate(sizes):
        kinds = ["token"] * size + ["empty"] * (block_size - size) + ["landmark"]
        places += [(number, kind) for kind in kinds]
    return places[phase : phase + length]


def loops(q, k, v, places, prefix=0, top_k=None, local_blocks=0):
    """Output (T, d) of one head, from the groups of the places: a softmax over groups, and one within each."""
    out = np.zeros_like(q)
    for i in range(prefix, len(k)):
        score = [float(q[i - prefix] @ k[j]) / math.sqrt(q.shape[1]) for j in range(i + 1)]
        own, near, groups = places[i][0], [], {}
        for j in range(i + 1):
            number, kind = places[j]
            if kind == "token":
                (near if own - number <= local_blocks else groups.setdefault(number, [])).append(j)
        gates = {
            places[j][0]: score[j]
            for j in range(i + 1)
            if places[j][1] == "landmark" and own - places[j][0] > local_blocks and groups.get(places[j][0])
        }
        best = sorted(gates, key=lambda number: gates[number], reverse=True)[:top_k]
        total = sum(math.exp(score[j]) for j in near) + sum(math.exp(gates[number]) for number in best)
        for j in near:
            out[i - prefix] += math.exp(score[j]) / total * v[j]
        for number in best:
            inner = sum(math.exp(score[j]) for j in groups[number])
            for j in groups[number]:
                out[i - prefix] += math.exp(gates[number]) / total * math.exp(score[j]) / inner * v[j]
    return out


@st.composite
def windows(draw):
    """ℓ, and the places of windows of the same length, cut from texts with blocks of any sizes."""
    block_size, length = draw(st.integers(1, 9)), draw(st.integers(1, 45))
    count = draw(st.integers(1, 3))
    blocks = (length + block_size) // (block_size + 1) + 1
    phases = [draw(st.integers(0, block_size)) for _ in range(count)]
    sizes = [draw(st.lists(st.integers(1, block_size), min_size=blocks, max_size=blocks)) for _ in range(count)]
    return block_size, phases, [cut(s, block_size, phase, length) for s, phase in zip(sizes, phases, strict=True)]


def tensors(block_size, phases, places, prefix=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    length = len(places[0])
    shapes = [(len(places), 2, size, 4) for size in (length - prefix, length, length)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    empty = torch.tensor([[kind == "empty" for _, kind in each] for each in places])
    return (q, k, v), {"block_size": block_size, "phase": torch.tensor(phases), "prefix": prefix, "empty": empty}


@given(windows(), st.integers(0, 12), st.one_of(st.none(), st.integers(1, 3)), st.integers(0, 2), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_output_equals_plain_loops(window, prefix, top_k, local_blocks, seed):
    """Windows cut anywhere, of ragged blocks, also within the empty places of the first block."""
    block_size, phases, places = window
    prefix = min(prefix, len(places[0]) - 1)
    (q, k, v), arguments = tensors(block_size, phases, places, prefix, seed)
    for backend in BACKENDS:
        out = landmark_attention(q, k, v, **arguments, top_k=top_k, local_blocks=local_blocks, backend=backend)
        for b, of_window in enumerate(places):
            for h in range(2):
                q_bh, k_bh, v_bh = (x[b, h].numpy() for x in (q, k, v))
                expected = loops(q_bh, k_bh, v_bh, of_window, prefix, top_k, local_blocks)
                np.testing.assert_allclose(out[b, h], expected, atol=1e-10, err_msg=backend)


@given(windows(), st.one_of(st.none(), st.integers(1, 3)), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_gradients_of_tiles_are_those_of_explicit_weights(window, top_k, local_blocks):
    """And keys and values of empty places have none."""
    (q, k, v), arguments = tensors(*window)
    upstream, found = torch.randn_like(q), []
    for backend in BACKENDS:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"top_k": top_k, "local_blocks": local_blocks, "backend": backend}
        out, lse = landmark_attention(*leaves, **arguments, **options, return_lse=True)
        finite = lse.masked_fill(lse.isinf(), 0.0)  # that of a query without a token is not
        found.append([out, lse, *torch.autograd.grad((out * upstream).sum() + finite.sum(), leaves)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)
    for gradient in found[1][3:]:
        at_empty = gradient.masked_select(arguments["empty"][:, None, :, None])
        torch.testing.assert_close(at_empty, torch.zeros_like(at_empty), atol=0, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"local_blocks": 1}])
def test_gradients_are_those_of_finite_differences(backend, options):
    places = cut([1, 3, 2, 1], 3, 2, 13)  # begins on the empty places of the first block
    _, arguments = tensors(3, [2], [places])
    leaves = [torch.randn(1, 1, 13, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: landmark_attention(*x, **arguments, **options, backend=backend), leaves)


@given(windows())
@settings(max_examples=30, deadline=None)
def test_rows_of_tokens_sum_to_one(window):
    """With values of one the output is the sum of a row's weights, on every backend, for many tiles too."""
    block_size, phases, places = window
    (q, k, v), arguments = tensors(block_size, phases, places)
    for backend in BACKENDS:
        out = landmark_attention(q, k, torch.ones_like(v), **arguments, backend=backend)
        for b, of_window in enumerate(places):
            at = [i for i, (_, kind) in enumerate(of_window) if kind == "token"]
            torch.testing.assert_close(out[b, :, at], torch.ones_like(out[b, :, at]))


def test_a_batch_of_many_tiles_and_parts():
    """Longer than a tile, and more sequences than are computed together, in float32."""
    generator = np.random.default_rng(0)
    sizes = [generator.integers(1, 51, 12).tolist() for _ in range(3)]
    places = [cut(s, 50, phase, 520) for s, phase in zip(sizes, (0, 17, 50), strict=True)]
    (q, k, v), arguments = tensors(50, [0, 17, 50], places)
    expected = landmark_attention(q, k, v, **arguments, backend="reference")
    out = landmark_attention(q.float(), k.float(), v.float(), **arguments, backend="blockwise")
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("in_any_order", [True, False])
def test_fused_kernels_have_the_numbers_of_the_tiles(dtype, in_any_order):
    """With their gradients, for windows cut anywhere, with queries behind a prefix, and blocks without a token."""
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for seed in range(3):
        generator = np.random.default_rng(seed)
        block_size, length = int(generator.integers(1, 20)), int(generator.integers(40, 150))
        phases = [0, int(generator.integers(block_size + 1))]
        sizes = [generator.integers(1, block_size + 1, length).tolist() for _ in phases]
        places = [cut(s, block_size, phase, length) for s, phase in zip(sizes, phases, strict=True)]
        (q, k, v), arguments = tensors(block_size, phases, places, prefix=7 * seed, seed=seed)
        arguments["empty"][1, -2 * block_size - 2 :] = True  # behind a text that is shorter than the other
        is_token = ~arguments["empty"][:, None, 7 * seed :, None]
        upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)) * is_token
        found = []
        torch.use_deterministic_algorithms(not in_any_order)
        try:
            for backend in ("triton", "blockwise"):
                leaves = [x.to(dtype if backend == "triton" else torch.float64).requires_grad_() for x in (q, k, v)]
                out, lse = landmark_attention(*leaves, **arguments, backend=backend, return_lse=True)
                gradients = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
                seen = is_token & lse.isfinite()[..., None]
                found.append([out.where(seen, 0), lse[..., None].where(seen, 0), *gradients])
        finally:
            torch.use_deterministic_algorithms(False)
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours.double(), expected.double(), atol=tolerance, rtol=tolerance)


def test_whole_blocks_have_the_numbers_of_no_mask_bit_for_bit():
    q, k, v = torch.randn(3, 2, 2, 70, 8)
    arguments = {"block_size": 9, "phase": torch.tensor([0, 4])}
    for backend in BACKENDS:
        without = landmark_attention(q, k, v, **arguments, backend=backend)
        empty = torch.zeros(2, 70, dtype=torch.bool)
        torch.testing.assert_close(
            landmark_attention(q, k, v, **arguments, empty=empty, backend=backend), without, atol=0, rtol=0
        )


@given(windows(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_offset_keys_take_the_token_before(window, continues):
    block_size, phases, places = window
    (_, k, _), arguments = tensors(block_size, phases, places)
    previous = torch.randn(len(places), 2, 1, 3, dtype=torch.float64) if continues else None
    is_landmark = torch.tensor([[kind == "landmark" for _, kind in each] for each in places])
    found = offset_keys(k, 3, is_landmark, previous, arguments["empty"])
    expected = k.clone()
    for b, of_window in enumerate(places):
        before = None if previous is None else previous[b, :, 0]
        for j, (_, kind) in enumerate(of_window):
            if kind == "token":
                if before is not None:
                    expected[b, :, j, 1:] = before
                before = k[b, :, j, 1:]
    kept = ~arguments["empty"]
    torch.testing.assert_close(found.transpose(1, 2)[kept], expected.transpose(1, 2)[kept], atol=0, rtol=0)


@given(windows())
@settings(max_examples=30, deadline=None)
def test_means_are_of_tokens(window):
    block_size, phases, places = window
    (_, k, _), arguments = tensors(block_size, phases, places)
    blocks = WindowBlocks.of(arguments["phase"], k.shape[2], block_size, k, arguments["empty"])
    found = blocks.add_means(k)
    for b, of_window in enumerate(places):
        for j, (number, kind) in enumerate(of_window):
            of_block = [i for i, place in enumerate(of_window) if place == (number, "token")]
            summary = k[b, :, of_block].mean(1) if kind == "landmark" and of_block else 0
            torch.testing.assert_close(found[b, :, j], k[b, :, j] + summary)


def test_summaries_of_complete_blocks_are_of_their_tokens():
    blocks, sizes = torch.randn(1, 2, 3, 6, 4, dtype=torch.float64), torch.tensor([5, 1, 3])
    found = add_summaries(blocks, sizes=sizes)
    for n, size in enumerate(sizes.tolist()):
        expected = blocks[:, :, n, 5] + blocks[:, :, n, :size].mean(2)
        torch.testing.assert_close(found[:, :, n, 5], expected)
    torch.testing.assert_close(found[..., :5, :], blocks[..., :5, :], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bidirectional": True}, "empty: leave out bidirectional"),
        ({"cu_seqlens": torch.tensor([0, 12])}, "empty: leave out"),
        ({"gates": torch.zeros(1, 1, 12, 3)}, "empty: leave out"),
        ({"backend": "triton", "sinks": torch.zeros(2)}, "empty="),
        ({"empty": torch.zeros(1, 11, dtype=torch.bool)}, r"empty must be bool of shape \(1, 12\)"),
        ({"empty": torch.zeros(1, 12)}, "empty must be bool"),
    ],
)
def test_refuses(options, message):
    q, k, v = torch.randn(3, 1, 1, 12, 4)
    arguments = {"block_size": 3, "empty": torch.zeros(1, 12, dtype=torch.bool)} | options
    with pytest.raises(ValueError, match=message):
        landmark_attention(q, k, v, **arguments)
