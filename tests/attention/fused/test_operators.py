"""The Triton kernels, interpreted: the equations with explicit weights for any shape; compiled: what GPUs hold."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import landmark.attention
from landmark.attention import backend_for, landmark_attention, place_phase
from landmark.attention.fused import operators, tuning
from landmark.attention.fused.tuning import A100, KERNELS, Gpu, choices, shared_memory
from landmark.utils.window_batch import most_blocks

ROOT = Path(__file__).parents[3]


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
        **draw(
            st.sampled_from([{"cmt": False}, {"cmt": True}, {"cmt": False, "joint": 0.5}, {"cmt": False, "joint": 1.0}])
        ),
        "seed": draw(st.integers(0, 2**31)),
    }


def run(shape, backend, dtype, compute=None, scale=1):
    """Output, log-sum-exp and gradients of numbers that are rounded to `dtype`, computed as `compute`.

    scale: factor of queries and keys.
    """
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
    q, k, v, *_ = leaves
    out, lse = landmark_attention(
        q * scale,
        k * scale,
        v,
        block_size=shape["block_size"],
        phase=torch.tensor(shape["phase"]),
        prefix=shape["prefix"],
        joint_softmax=shape.get("joint", 0.0),
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


@contextmanager
def in_one():
    """One kernel computes all gradients in float32 too, as it does in half precision on GPUs."""
    asked = []

    def as_in_half_precision(kernel, block_size, dim, element_size, gpu, cmt):
        asked.append(kernel)
        return choices(kernel, block_size, dim, 2 if kernel == "backward" else element_size, gpu, cmt)

    with mock.patch.object(tuning, "choices", as_in_half_precision):
        yield
    assert "backward" in asked
    assert "backward_keys" not in asked


@given(shapes().filter(lambda shape: shape["block_size"] < 64))
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_gradients_of_any_shape_by_one_kernel(shape):
    with in_one():
        assert_as_exact_as_pytorch(shape | {"cmt": False}, torch.float32)


SHAPE = {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 140, "prefix": 9, "lengths": None, "dim": 16, "seed": 0}
SHAPE |= {"block_size": 50, "phase": [50, 7], "cmt": True}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block_size", "joint"), [(10, 0.0), (50, 0.0), (50, 0.5), (50, 1.0)])
def test_half_precision(dtype, block_size, joint):
    shape = {"block_size": block_size, "phase": [block_size, 7], "cmt": False, "joint": joint}
    assert_as_exact_as_pytorch(SHAPE | shape, dtype)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_joint_softmax_by_the_pair_and_by_one_kernel(share):
    shape = SHAPE | {"block_size": 10, "phase": [10, 7], "cmt": False, "joint": share}
    assert_as_exact_as_pytorch(shape, torch.float32)
    with in_one():
        assert_as_exact_as_pytorch(shape, torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ({"dim": 128, "queries": 40}, torch.float32),
        ({"dim": 80, "block_size": 127, "phase": [127, 100], "queries": 70}, torch.float32),
    ],
)
def test_long_heads_and_blocks(shape, dtype):
    assert_as_exact_as_pytorch(SHAPE | shape | {"heads": 1, "cmt": False}, dtype)


def test_blocks_that_no_tile_holds_are_refused():
    q, k, v = torch.randn(3, 1, 1, 300, 80)
    with pytest.raises(ValueError, match="block_size=255 and heads of 80 numbers do not fit"):
        landmark_attention(q, k, v, block_size=255, backend="triton")


def test_deterministic_algorithms_take_the_pair_of_kernels(monkeypatch):
    launched = []
    monkeypatch.setattr(operators, "launch", lambda kernel, *_, **__: launched.append(kernel))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            run(SHAPE | {"cmt": False}, "triton", torch.float16)
        finally:
            torch.use_deterministic_algorithms(False)
    run(SHAPE, "triton", torch.float16)
    pair = ["forward", "backward_queries", "backward_keys"]
    assert launched == ["forward", "backward", *pair, *pair]


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
    sizes = None if cmt else torch.tensor([[6, 3, 6, 1]], dtype=torch.int32)
    arguments = (q, k, v, phase, None, *(of_cmt if cmt else (None, None)), sizes, 6, 0, 0.3, not cmt)
    torch.library.opcheck(torch.ops.landmark.attention.default, arguments)


@pytest.mark.parametrize("cmt", [False, True])
def test_activation_checkpointing_changes_nothing(cmt):
    leaves = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    leaves += [torch.randn(2, 8, requires_grad=True)] if cmt else []

    def attend(q, k, v, cmt=None):
        return landmark_attention(q, k, v, block_size=6, cmt=cmt, backend="triton")

    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    ours = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).sum(), leaves)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


class Copies(TorchDispatchMode):
    """Counts tensors that are copied from the CPU to another device."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.number += args[0].device.type == "cpu" and result.device.type != "cpu"
        return result


@pytest.mark.parametrize("cmt", [False, True])
def test_nothing_is_copied_to_the_device_in_a_layer(cmt):
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:  # computes shapes and devices alone
        q = torch.empty(2, 2, 20, 8, device="cuda")
        phase = place_phase(torch.tensor([1, 2]), "triton", q, 6)
        assert copies.number == 1
        for given in (None, phase):
            key = torch.empty(2, 8, device="cuda") if cmt else None
            landmark_attention(q, q, q, block_size=6, phase=given, cmt=key, backend="triton")
    assert copies.number == 1


def test_scores_too_large_for_exact_differences_have_finite_gradients():
    shape = SHAPE | {"queries": 40, "block_size": 6, "phase": [0, 3], "cmt": False}
    for backend in ("triton", "blockwise"):
        found = run(shape, backend, torch.float32, scale=1e10)
        assert all(bool(x[x != -torch.inf].isfinite().all()) for x in found), backend


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


GPUS = {name: Gpu(*limits) for name, limits in {"T4": (75, 64 << 10), "RTX 3090": (86, 99 << 10)}.items()}
GPUS |= {"A100": A100, "H100": Gpu(90, 227 << 10), "RTX 5090": Gpu(120, 99 << 10)}


def test_wide_tiles_of_newer_gpus(monkeypatch):
    monkeypatch.setattr(tuning, "gpu_of", lambda device: GPUS["H100"])
    tiles = choices("forward", 31, 16, 2, GPUS["H100"], cmt=False)[0]
    assert tiles.wide > tiles.group
    shape = {"heads": 1, "queries": 450, "block_size": 31, "phase": [5, 31], "cmt": False}
    assert_as_exact_as_pytorch(SHAPE | shape, torch.float16)


def test_blocks_too_large_for_a_gpu_use_another_backend(monkeypatch):
    def chosen(gpu, block_size, dim=128, dtype=torch.bfloat16):
        monkeypatch.setattr(tuning, "gpu_of", lambda device: GPUS[gpu])
        q = mock.Mock(is_cuda=True, dtype=dtype, shape=(1, 1, 8, dim), element_size=lambda: dtype.itemsize)
        return backend_for("auto", q, block_size)

    for gpu in ("RTX 3090", "A100", "H100", "RTX 5090"):
        for block_size in (50, 63, 127):
            assert chosen(gpu, block_size) == "triton", gpu
    landmark.attention._say_once.cache_clear()
    with pytest.warns(UserWarning, match="blocks of 63 tokens with heads of 256 .* do not fit"):
        assert chosen("A100", 63, 256, torch.float32) == "blockwise"
    with pytest.warns(UserWarning, match="blocks of 255 tokens"):
        assert chosen("H100", 255) == "blockwise"
    chosen("H100", 255)  # a second warning would be an error
    with pytest.warns(UserWarning, match="older than the kernels need"):
        assert chosen("T4", 63, 64, torch.float16) == "blockwise"


def test_no_choice_exceeds_the_shared_memory_of_a_gpu():
    """The largest that was seen to exceed it: 90,112 bytes and more on 101,376, with the tiles of larger GPUs."""
    for gpu in GPUS.values():
        for kernel, block_size, dim, size in itertools.product(KERNELS, (15, 63, 127), (64, 128, 256), (2, 4)):
            for tiles in choices(kernel, block_size, dim, size, gpu, cmt=False):
                assert shared_memory(kernel, tiles, dim, size) <= gpu.shared_memory
    narrow = choices("backward_keys", 63, 256, 2, GPUS["RTX 3090"], cmt=False)[0]
    assert narrow.queries < choices("backward_keys", 63, 256, 2, A100, cmt=False)[0].queries


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_no_register_is_spilled_and_shared_memory_suffices(arch):
    cases = [
        "64 50",
        "128 50",
        "64 63 packed",
        "128 63",
        "128 50 uneven",
        "128 50 joint",
        "64 63 cmt",
        "128 50 cmt packed",
        "128 63 float32",
    ]
    command = [sys.executable, "-m", "benchmarks.compiled_kernels", arch, *cases]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == cases
    for case, kernels in found.items():
        for kernel, used in kernels.items():
            spilled = 64 if (arch, case, kernel) == ("sm_80", "64 63 cmt", "backward_keys") else 0
            assert used["stack"] <= (272 if "float32" in case else spilled), (case, kernel, used)
            assert used["shared"] <= used["allowed"], (case, kernel, used)
            by_groups = arch == "sm_90" and "float32" not in case and "top_k" not in kernel
            no_products = kernel.endswith(("shared=False", "rows=1"))
            assert (used["by_warps"] == 0) == (by_groups or no_products), (case, kernel, used)


def test_tiles_hold_whole_blocks():
    for block_size in range(1, 256):
        for chosen in choices("forward", block_size, 64, 2, GPUS["H100"], cmt=False):
            assert chosen.segment >= block_size + 1
            assert chosen.group * chosen.segment == max(64, chosen.segment)
