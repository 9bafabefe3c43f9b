"""The Triton kernels, interpreted: the equations with explicit weights for any shape; compiled: what GPUs hold."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from landmark.attention import backend_for, landmark_attention
from landmark.attention.fused.tuning import choices, fits
from landmark.utils.window_batch import most_blocks

ROOT = Path(__file__).parents[3]
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10}  # of a block of threads


@st.composite
def shapes(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 7, 10, 15, 31, 50, 63, 64, 70, 130]))
    lengths = draw(st.one_of(st.none(), st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(any)))
    batch = draw(st.integers(1, 2)) if lengths is None else 1
    samples = batch if lengths is None else len(lengths)
    queries = draw(st.one_of(st.integers(1, 40), st.integers(120, 140))) if lengths is None else sum(lengths)
    return {
        "batch": batch,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([kv_heads for kv_heads in (1, 2, 4) if heads % kv_heads == 0])),
        "queries": queries,
        "prefix": draw(st.one_of(st.just(0), st.integers(0, 90))) if lengths is None else 0,
        "lengths": lengths,
        "dim": draw(st.sampled_from([4, 16, 20])),
        "block_size": block_size,
        "phase": draw(st.lists(st.integers(0, block_size), min_size=samples, max_size=samples)),
        "cmt": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def run(shape, backend, dtype, compute=None):
    """Output, log-sum-exp and gradients of numbers that are rounded to `dtype`, computed as `compute`."""
    generator = torch.Generator().manual_seed(shape["seed"])

    def draw(*size):
        x = torch.randn(*size, dtype=torch.float64, generator=generator).to(dtype)
        return x.to(compute or dtype).requires_grad_()

    batch, heads, kv_heads, dim = (shape[key] for key in ("batch", "heads", "kv_heads", "dim"))
    length = shape["prefix"] + shape["queries"]
    leaves = [draw(batch, heads, shape["queries"], dim), *(draw(batch, kv_heads, length, dim) for _ in range(2))]
    grad = draw(batch, heads, shape["queries"], dim).detach()
    optional = {}
    if shape["lengths"] is not None:
        optional["cu_seqlens"] = torch.tensor([0, *shape["lengths"]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if shape["cmt"]:
        leaves.append(draw(kv_heads, dim))
        blocks = most_blocks(length, shape["block_size"])
        optional["cmt"] = leaves[3]
        optional["controlled"] = torch.rand(len(shape["phase"]), blocks, generator=generator) < 0.5
    out, lse = landmark_attention(
        *leaves[:3],
        block_size=shape["block_size"],
        phase=torch.tensor(shape["phase"]),
        prefix=shape["prefix"],
        backend=backend,
        return_lse=True,
        **optional,
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_as_exact_as_pytorch(shape, dtype):
    """No further from float64 than twice what plain PyTorch is in the same precision, or than rounding a few times."""
    exact = run(shape, "reference", dtype, torch.float64)
    plain, ours = run(shape, "reference", dtype), run(shape, "triton", dtype)
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv", "dcmt"), ours, plain, exact):
        assert torch.equal(a.isinf(), c.isinf()), name
        off, plainly = ((x.double() - c).masked_fill(c.isinf(), 0.0).abs().max().item() for x in (a, b))
        rounding = 16 * torch.finfo(dtype).eps * (1 + c.masked_fill(c.isinf(), 0.0).abs().max().item())
        assert off <= max(2 * plainly, rounding), f"{name}: {off:.1e}, plain PyTorch {plainly:.1e}"


@given(shapes())
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_outputs_and_gradients_of_any_shape(shape):
    assert_as_exact_as_pytorch(shape, torch.float32)


SHAPE = {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 140, "prefix": 9, "lengths": None, "dim": 16, "seed": 0}
SHAPE |= {"block_size": 50, "phase": [50, 7], "cmt": True}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [10, 50])
def test_half_precision(dtype, block_size):
    phase = [block_size, 7]
    assert_as_exact_as_pytorch(SHAPE | {"block_size": block_size, "phase": phase, "cmt": False}, dtype)


def test_long_heads_and_blocks():
    for shape in ({"dim": 256, "queries": 40}, {"dim": 80, "block_size": 255, "phase": [255, 100], "queries": 70}):
        assert_as_exact_as_pytorch(SHAPE | shape | {"heads": 1, "cmt": False}, torch.float32)


def test_every_number_is_written():
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert_as_exact_as_pytorch(SHAPE, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)


def test_strided_inputs():
    qkv = torch.randn(2, 70, 3, 2, 8)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    expected = landmark_attention(q.contiguous(), k.contiguous(), v.contiguous(), block_size=6, backend="triton")
    torch.testing.assert_close(landmark_attention(q, k, v, block_size=6, backend="triton"), expected)
    backwards = [x.flip(-1).transpose(2, 3).contiguous().transpose(2, 3).flip(-1) for x in (q, k, v)]
    torch.testing.assert_close(landmark_attention(*backwards, block_size=6, backend="triton"), expected)


@pytest.mark.parametrize("lengths", [None, [12, 18]])
def test_compiles_as_one_graph(lengths):
    q, k, v = (torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3))
    cu_seqlens = None if lengths is None else torch.tensor([0, 12, 30], dtype=torch.int32)

    def attend(q, k, v):
        return landmark_attention(q * 2, k, v, block_size=6, cu_seqlens=cu_seqlens, backend="triton") * 2

    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    expected = attend(q, k, v)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("cmt", [False, True])
def test_operator_passes_opcheck(cmt):
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    phase = torch.zeros(1, dtype=torch.int32)
    of_cmt = torch.randn(1, 2, 20, requires_grad=True), torch.ones(1, 3, dtype=torch.int8)
    arguments = (q, k, v, phase, None, *(of_cmt if cmt else (None, None)), 6, 0, 0.3)
    torch.library.opcheck(torch.ops.landmark.attention.default, arguments)


def test_unsupported_inputs_are_refused(monkeypatch):
    q = torch.randn(1, 1, 8, 4)
    with pytest.raises(ValueError, match="backend=triton: q must be of type torch.float32"):
        landmark_attention(q.double(), q.double(), q.double(), block_size=3, backend="triton")
    with pytest.raises(ValueError, match="backend=triton: scale must be positive, got 0"):
        landmark_attention(q, q, q, block_size=3, scale=0.0, backend="triton")
    with pytest.raises(ValueError, match="must have one type, got torch.float32, torch.float32, torch.float16"):
        landmark_attention(q, q, q.half(), block_size=3, backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="backend=triton needs a GPU"):
        landmark_attention(q, q, q, block_size=3, backend="triton")


def test_blocks_too_large_for_a_gpu_use_another_backend(monkeypatch):
    q = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 8, 256), element_size=lambda: 2)
    assert backend_for("auto", q, block_size=127) == "triton"
    assert backend_for("auto", q, block_size=128) == "blockwise"
    for dim, size in ((64, 4), (128, 2)):  # of 255 at most
        assert fits(255, dim, size)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_no_register_is_spilled_and_shared_memory_suffices(arch):
    cases = ["64 50", "128 50", "64 63 packed", "128 63", "64 63 cmt", "128 50 cmt packed", "128 63 float32"]
    command = [sys.executable, "-m", "tests.attention.fused.compile_kernels", arch, *cases]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == cases
    for case, kernels in found.items():
        for kernel, used in kernels.items():
            spilled = 48 if (arch, case, kernel) == ("sm_80", "64 63 cmt", "backward_keys") else 0
            assert used["stack"] <= (256 if "float32" in case else spilled), (case, kernel, used)
            assert used["shared"] <= SHARED_MEMORY[arch], (case, kernel, used)
            by_groups = (arch == "sm_90" and "float32" not in case) or "shared=False" in kernel
            assert (used["by_warps"] == 0) == by_groups, (case, kernel, used)


def test_tiles_hold_whole_blocks():
    for block_size in range(1, 256):
        for chosen in choices("forward", block_size, 64, 2, 90, cmt=False):
            assert chosen.segment >= block_size + 1
            assert chosen.group * chosen.segment == max(64, chosen.segment)
