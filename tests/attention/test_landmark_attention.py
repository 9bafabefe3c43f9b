"""Every path computes the paper's equations, for any shape, with its gradients."""

import itertools
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from landmark.attention import blockwise, landmark_attention, workspace
from landmark.attention.layout import blocks_and_landmarks
from landmark.attention.reference import grouped_softmax, landmark_attention_weights
from landmark.utils.window_batch import most_blocks
from tests import naive


def inputs(batch, heads, kv_heads, queries, prefix, dim, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(h, t):
        return torch.randn(batch, h, t, dim, dtype=dtype, generator=generator).requires_grad_()

    return draw(heads, queries), draw(kv_heads, prefix + queries), draw(kv_heads, prefix + queries)


@st.composite
def shapes(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    block_size = draw(st.integers(1, 12))
    batch = draw(st.integers(1, 3))
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([h for h in (1, 2, 4) if heads % h == 0])),
        "queries": draw(st.integers(1, 45)),
        "prefix": draw(st.one_of(st.just(0), st.integers(0, 40))),
        "dim": draw(st.sampled_from([2, 4, 6, 16])),
        "block_size": block_size,
        "phase": draw(st.one_of(st.none(), st.lists(st.integers(0, block_size), min_size=batch, max_size=batch))),
        "seed": draw(st.integers(0, 2**31)),
        "cmt": draw(st.booleans()),
    }


def leaves_of(shape, dtype=torch.float64):
    return inputs(
        **{key: value for key, value in shape.items() if key not in ("block_size", "phase", "cmt")}, dtype=dtype
    )


def cmt_of(shape, dtype=torch.float64):
    """Key of a context miss token that now and then wins or loses all, and the landmarks it controls."""
    if not shape.get("cmt"):
        return None, None
    generator = torch.Generator().manual_seed(shape["seed"] + 2)
    blocks = most_blocks(shape["prefix"] + shape["queries"], shape["block_size"])
    key = torch.randn(shape["kv_heads"], shape["dim"], dtype=dtype, generator=generator).requires_grad_()
    probability = torch.rand(shape["batch"], 1, generator=generator) * 1.4 - 0.2
    return key, torch.rand(shape["batch"], blocks, generator=generator) < probability


def run(shape, backend, dtype=torch.float64):
    phase = None if shape["phase"] is None else torch.tensor(shape["phase"])
    q, k, v = leaves_of(shape, dtype)
    cmt, controlled = cmt_of(shape, dtype)
    out, lse = landmark_attention(
        q,
        k,
        v,
        block_size=shape["block_size"],
        phase=phase,
        prefix=shape["prefix"],
        cmt=cmt,
        controlled=controlled,
        backend=backend,
        return_lse=True,
    )
    grad = torch.randn(out.shape, dtype=dtype, generator=torch.Generator().manual_seed(shape["seed"] + 1))
    leaves = (q, k, v) if cmt is None else (q, k, v, cmt)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_same(ours, expected, tolerance):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dcmt"), ours, expected):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@given(shapes())
@settings(max_examples=120, deadline=None)
def test_blockwise_equals_reference_with_gradients(shape):
    assert_same(run(shape, "blockwise"), run(shape, "reference"), 1e-10)


@given(shapes(), st.sampled_from([1, 300, 1 << 20]), st.sampled_from([1, 20, 102]))
@settings(max_examples=60, deadline=None)
def test_the_size_of_tiles_changes_nothing(shape, size, rows):
    with mock.patch.multiple(blockwise, TILE_SIZE=size, TILE_ROWS=rows):
        ours = run(shape, "blockwise")
    assert_same(ours, run(shape, "reference"), 1e-10)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_packed_documents_do_not_see_each_other(backend):
    lengths, phase = [7, 0, 1, 12], torch.tensor([6, 2, 0, 3])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (x.detach() for x in inputs(1, 2, 1, sum(lengths), 0, 4))
    cmt = torch.randn(1, 4, dtype=torch.float64)
    controlled = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    settings = {"block_size": 6, "cmt": cmt, "backend": backend}
    packed = landmark_attention(q, k, v, phase=phase, controlled=controlled, cu_seqlens=ends, **settings)
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            parts = (x[:, :, start:end] for x in (q, k, v))
            alone = landmark_attention(*parts, phase=phase[i : i + 1], controlled=controlled[i : i + 1], **settings)
            torch.testing.assert_close(packed[:, :, start:end], alone, atol=0, rtol=0)


@pytest.mark.parametrize("cmt", [False, True])
def test_uninitialised_memory_is_never_read(cmt):
    shape = {"batch": 3, "heads": 2, "kv_heads": 1, "queries": 40, "prefix": 9, "dim": 4, "seed": 0}
    shape |= {"block_size": 6, "phase": [0, 6, 3], "cmt": cmt}
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        ours = run(shape, "blockwise")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(ours, run(shape, "reference"), 1e-10)


@pytest.mark.parametrize("backend", ["blockwise", "reference", "triton"])
@pytest.mark.parametrize(("batch", "queries", "prefix"), [(0, 5, 3), (2, 0, 3), (2, 0, 0)])
def test_no_sample_and_no_query_give_nothing(batch, queries, prefix, backend):
    shape = {"batch": batch, "heads": 2, "kv_heads": 1, "queries": queries, "prefix": prefix, "dim": 4, "seed": 0}
    shape |= {"block_size": 6, "phase": None, "cmt": True}
    out, lse, *gradients = run(shape, backend, torch.float32)
    assert out.shape == (batch, 2, queries, 4)
    assert lse.shape == (batch, 2, queries)
    assert not any(bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_reach_only_queries_that_see_them(value):
    q, k, v = (x.detach() for x in inputs(2, 2, 2, 60, 9, 4))
    settings = {"block_size": 6, "phase": torch.tensor([2, 0]), "prefix": 9, "backend": "blockwise"}
    expected = landmark_attention(q, k, v, **settings)
    for at in (31, 32):  # 32 is a landmark of the first sample
        for x in (k, v):
            before = x[:, :, at].clone()
            x[:, :, at] = value
            ours = landmark_attention(q, k, v, **settings)
            x[:, :, at] = before
            torch.testing.assert_close(ours[:, :, : at - 9], expected[:, :, : at - 9])
    assert not ours[1, :, 32 - 9 :].isfinite().any()
    torch.testing.assert_close(ours[0], expected[0])  # the value of a landmark is never used


def test_a_context_miss_token_in_half_precision():
    tensors = [x.detach() for x in inputs(2, 2, 1, 40, 9, 4, dtype=torch.bfloat16)]
    tensors.append(torch.randn(1, 4, generator=torch.Generator().manual_seed(1)).bfloat16())
    controlled = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) < 0.5

    def attend(q, k, v, cmt):
        settings = {"block_size": 6, "prefix": 9, "controlled": controlled, "backend": "reference"}
        return landmark_attention(q, k, v, cmt=cmt, **settings)

    ours = attend(*tensors)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), attend(*(x.double() for x in tensors)), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("backend", ["blockwise", "reference", "triton"])
def test_under_autocast_types_may_be_mixed(backend):
    q, k, v = (x.detach() for x in inputs(2, 2, 1, 40, 9, 4, dtype=torch.float32))
    settings = {"block_size": 6, "prefix": 9, "cmt": torch.randn(1, 4), "backend": backend}
    with torch.autocast("cpu", torch.float16):
        ours = landmark_attention(q, k, v.half(), **settings)
    assert ours.dtype == torch.float16
    expected = landmark_attention(q.half(), k.half(), v.half(), **settings)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


class LargestTensor(TorchDispatchMode):
    """The most numbers that any operation's result held in memory of its own."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_no_tensor_is_quadratic_in_the_length():
    heads, length, dim = 2, 3000, 8
    leaves = inputs(1, heads, heads, length, 0, dim, dtype=torch.float32)
    fresh = mock.patch.object(workspace, "_kept", workspace._Kept())  # not what an earlier call has left
    with fresh, LargestTensor() as largest, mock.patch.object(blockwise, "TILE_SIZE", 1):
        landmark_attention(*leaves, block_size=50).sum().backward()
    assert largest.numbers <= 102 * (length + 102), "a tile"
    assert largest.numbers < length * length / 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    leaves = [x.detach().to(dtype) for x in inputs(2, 2, 2, 90, 0, 16)]
    phase = torch.tensor([0, 7])
    exact = landmark_attention(*(x.double() for x in leaves), block_size=20, phase=phase, backend="reference")
    ours = landmark_attention(*leaves, block_size=20, phase=phase)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=float(torch.finfo(dtype).eps))


@given(shapes())
@settings(max_examples=25, deadline=None)
def test_reference_equals_plain_loops(shape):
    out = run(shape, "reference")[0]
    q, k, v = (x.detach().numpy() for x in leaves_of(shape))
    key, controlled = cmt_of(shape)
    group = shape["heads"] // shape["kv_heads"]
    for b in range(shape["batch"]):
        phase = 0 if shape["phase"] is None else shape["phase"][b]
        for h in range(shape["heads"]):
            expected = naive.landmark_attention(
                *(q[b, h], k[b, h // group], v[b, h // group], shape["block_size"], phase, shape["prefix"]),
                *(() if key is None else (key[h // group].detach().numpy(), controlled[b].numpy())),
            )
            np.testing.assert_allclose(out[b, h], expected, atol=1e-10)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_single_precision_error(dim):
    """Float32 stays within 5e-6 of the float64 reference, outputs and gradients of order one."""
    shape = {"batch": 3, "heads": 2, "kv_heads": 2, "queries": 300, "prefix": 0, "dim": dim, "seed": 3}
    phase = torch.tensor([0, 17, 50])
    leaves = inputs(**shape)
    results = []
    for backend, dtype in (("reference", torch.float64), ("blockwise", torch.float32)):
        x = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        out = landmark_attention(*x, block_size=50, phase=phase, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))])
    for exact, ours in zip(*results):
        assert (ours - exact).abs().max() <= 5e-6


def test_weights_sum_to_one_and_landmarks_weigh_nothing():
    phase = torch.tensor([0, 3, 5])
    scores = torch.randn(3, 2, 17, 17, dtype=torch.float64)
    weights, _ = landmark_attention_weights(scores, 5, phase)
    sums = weights.sum(-1)
    assert sums[2, :, 0].eq(0).all(), "the landmark of an empty first block attends to nothing"
    sums[2, :, 0] = 1
    torch.testing.assert_close(sums, torch.ones_like(sums))
    _, is_landmark = blocks_and_landmarks(phase, 17, 5)
    assert weights.movedim(-1, 1)[is_landmark].eq(0).all()


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_weight_of_the_context_miss_token_goes_to_its_landmarks_or_nowhere(backend):
    """Values of one: the output is the sum of weights, 1 where a controlled landmark is seen and 1 − S elsewhere."""
    q, k, _ = (x.detach() for x in inputs(1, 2, 2, 17, 0, 4))
    controlled = torch.tensor([[False, True, False, False]])
    cmt = torch.randn(2, 4, dtype=torch.float64)
    out, lse = landmark_attention(
        *(q, k, torch.ones_like(q)), block_size=5, cmt=cmt, controlled=controlled, backend=backend, return_lse=True
    )
    weight = (torch.einsum("bhtd,hd->bht", q, cmt) / 2 - lse).exp()
    sees = torch.arange(17) >= 12  # the landmark at 11, from the next block on
    torch.testing.assert_close(out[..., 0], torch.where(sees, 1.0, 1 - weight))


def test_worked_example_of_appendix_a():
    """Blocks of two tokens: a b L c d L e. Groups and products as the paper draws them for the last token."""
    scores = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    scores[0, 0, 6] = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.0, 1.5, 0.25]).log1p().nan_to_num(neginf=-30.0)
    weights, _ = landmark_attention_weights(scores, 2, torch.tensor([0]))
    e = scores[0, 0, 6].exp()
    outer = e[2] + e[5] + e[6]
    first, second = e[0] + e[1], e[3] + e[4]
    expected = torch.stack(
        [
            e[0] / first * e[2] / outer,
            e[1] / first * e[2] / outer,
            torch.zeros_like(outer),
            e[3] / second * e[5] / outer,
            e[4] / second * e[5] / outer,
            torch.zeros_like(outer),
            e[6] / outer,
        ]
    )
    torch.testing.assert_close(weights[0, 0, 6], expected)


def test_bidirectional_weights_are_those_of_the_second_reproduction():
    """The matrix that its README works through: blocks of two tokens, every row of scores the same."""
    scores = torch.tensor([1.0, 2, 3, 1, 2, 3], dtype=torch.float64).log().expand(1, 1, 6, 6)
    normal, first, second = [1, 2, 0, 1, 2, 0], [1, 2, 3, 0, 0, 0], [0, 0, 0, 1, 2, 3]
    expected = torch.tensor([normal, normal, first, normal, normal, second], dtype=torch.float64) / 6
    variant = {"bidirectional": True, "landmarks_see_own_block": True}
    weights, _ = landmark_attention_weights(scores, 2, torch.tensor([0]), **variant)
    torch.testing.assert_close(weights[0, 0], expected)


def test_window_cut_on_a_landmark():
    q, k, v = inputs(2, 1, 1, 9, 0, 4)
    out = landmark_attention(q, k, v, block_size=3, phase=torch.tensor([3, 0]))
    assert out[0, 0, 0].eq(0).all()
    assert out.isfinite().all()
    q2, k2, v2 = q.detach().clone(), k.detach().clone(), v.detach().clone()
    k2[0, 0, 0] += 100.0
    v2[0, 0, 0] += 100.0
    changed = landmark_attention(q2, k2, v2, block_size=3, phase=torch.tensor([3, 0]))
    torch.testing.assert_close(changed[0], out[0].detach())


def test_strided_inputs_need_no_copy_from_the_caller():
    qkv = torch.randn(2, 30, 3, 4, 8, dtype=torch.float64)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    expected = landmark_attention(q.contiguous(), k.contiguous(), v.contiguous(), block_size=6)
    torch.testing.assert_close(landmark_attention(q, k, v, block_size=6), expected)


def test_grouped_softmax_of_one_group_is_softmax():
    scores = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(grouped_softmax(scores, torch.zeros(7, dtype=torch.int64), 1), scores.softmax(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"phase": torch.tensor([0, 6])}, "must lie in 0…block_size"),
        ({"phase": torch.tensor([0])}, "one number for each sample"),
        ({"prefix": 1}, "must have shape"),
        ({"backend": "magic"}, "backend must be one of"),
        ({"controlled": torch.zeros(2, 3, dtype=torch.bool)}, "need a context miss token"),
        ({"cmt": torch.zeros(2, 4)}, r"cmt must have shape \(1, 4\)"),
        ({"cmt": torch.zeros(1, 4), "controlled": torch.zeros(2, 2, dtype=torch.bool)}, "3 or more"),
    ],
)
def test_bad_input_is_refused(change, message):
    q, k, v = inputs(2, 1, 1, 9, 0, 4)
    with pytest.raises(ValueError, match=message):
        landmark_attention(q, k, v, **{"block_size": 5, **change})


def test_heads_that_do_not_divide_are_refused():
    q, k, v = inputs(1, 3, 2, 5, 0, 4)
    with pytest.raises(ValueError, match="do not divide"):
        landmark_attention(q, k, v, block_size=5)


def test_importing_attention_loads_nothing_heavy():
    code = (
        "import sys, landmark.attention; "
        "print([m for m in ('lightning', 'hydra', 'wandb', 'datasets', 'matplotlib', 'tiktoken') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
