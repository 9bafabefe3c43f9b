"""The Triton kernels, interpreted: the equations with explicit weights for any shape; compiled: what GPUs hold."""

import functools
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import landmark.attention
from landmark.attention import (
    ContextMiss,
    Grouped,
    Packed,
    Scoring,
    Sinks,
    Window,
    backend_for,
    landmark_attention,
    place_phase,
)
from landmark.attention.fused import operators, tuning
from landmark.attention.fused.tuning import A100, KERNELS, Gpu, choices, shared_memory
from landmark.utils.window_batch import most_blocks
from tests.pairs import all_pairs, name_of

ROOT = Path(__file__).parents[3]


SHAPES = all_pairs(
    {
        "heads": [(1, 1), (2, 1), (4, 2)],
        "queries": [1, 9, 70],
        "prefix": [0, 5, 33],
        "lengths": [None, [60], [0, 31, 1, 8]],
        "dim": [4, 20],
        "block_size": [1, 4, 15, 64, 130],
        "phase": ["none missing", "cut", "on a landmark"],
        "extra": [None, "controlled", "sinks"],
        "alpha": [0.0, 0.5, 1.0],
    },
    lambda case: (
        (not case["prefix"] or case["lengths"] is None) and (not case["alpha"] or case["extra"] != "controlled")
    ),
)


def run(shape, backend, dtype, compute=None, scale=1):
    """Output, log-sum-exp and gradients of numbers that are rounded to `dtype`, computed as `compute`.

    scale: factor of queries and keys.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        x = torch.randn(*size, dtype=torch.float64, generator=generator).to(dtype)
        return x.to(compute or dtype).requires_grad_()

    (heads, kv_heads), lengths, dim, block_size = (shape[key] for key in ("heads", "lengths", "dim", "block_size"))
    queries = shape["queries"] if lengths is None else sum(lengths)
    batch, samples, length = (2, 2, shape["prefix"] + queries) if lengths is None else (1, len(lengths), max(lengths))
    q, k, v = draw(batch, heads, queries, dim), *(draw(batch, kv_heads, shape["prefix"] + queries, dim) for _ in "kv")
    leaves, extra = [q, k, v], None
    phases = {"none missing": [0] * 4, "cut": [block_size // 2, 0, 1, 1], "on a landmark": [block_size, 1, 1, 0]}
    phase = torch.tensor(phases[shape["phase"]][:samples])
    if shape["extra"] == "sinks":
        leaves.append(draw(heads))
        extra = Sinks(leaves[3])
    elif shape["extra"] is not None:
        leaves.append(draw(kv_heads, dim))
        blocks = most_blocks(length, block_size)
        extra = ContextMiss(leaves[3], torch.rand(samples, blocks, generator=generator) < 0.5)
    layout = Window(block_size, phase, shape["prefix"])
    if lengths is not None:
        layout = Packed(block_size, phase, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32))
    gate = Grouped(shape["alpha"])
    out, lse = landmark_attention(q * scale, k * scale, v, layout, gate=gate, extra=extra, backend=backend)
    of_out, of_lse = draw(*out.shape).detach(), draw(*lse.shape).detach()
    total = (out * of_out).sum() + (lse.masked_fill(lse.isinf(), 0.0) * of_lse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def assert_as_exact_as_pytorch(shape, dtype):
    """No further from float64 than twice what plain PyTorch is in the same precision, or than rounding a few times."""
    exact = run(shape, "reference", dtype, torch.float64)
    plain, ours = run(shape, "reference", dtype), run(shape, "triton", dtype)
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv", "dextra"), ours, plain, exact):
        assert torch.equal(a.isinf(), c.isinf()), name
        off, plainly = ((x.double() - c).masked_fill(c.isinf(), 0.0).abs().max().item() for x in (a, b))
        rounding = 16 * torch.finfo(dtype).eps * (1 + c.masked_fill(c.isinf(), 0.0).abs().max().item())
        assert off <= max(2 * plainly, rounding), f"{name}: {off:.1e}, plain PyTorch {plainly:.1e}"


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
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


SHAPE = {"heads": (2, 1), "queries": 90, "prefix": 9, "lengths": None, "dim": 16, "block_size": 50}
SHAPE |= {"phase": "on a landmark", "extra": "controlled", "alpha": 0.0}
PLAIN = SHAPE | {"extra": None}


@pytest.mark.parametrize(
    "shape", [case for case in SHAPES if case["block_size"] < 64 and not case["extra"]][:6], ids=name_of
)
def test_gradients_of_any_shape_by_one_kernel(shape):
    with in_one():
        assert_as_exact_as_pytorch(shape, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "block_size", "alpha"),
    [(torch.bfloat16, 10, 0.0), (torch.bfloat16, 50, 0.5), (torch.float16, 50, 0.0), (torch.float16, 10, 1.0)],
)
def test_half_precision(dtype, block_size, alpha):
    assert_as_exact_as_pytorch(PLAIN | {"block_size": block_size, "alpha": alpha}, dtype)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_joint_softmax_by_one_kernel(alpha):
    with in_one():
        assert_as_exact_as_pytorch(PLAIN | {"block_size": 10, "alpha": alpha}, torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ({"dim": 128, "queries": 40}, torch.float32),
        ({"dim": 80, "block_size": 127, "queries": 70}, torch.float32),
    ],
)
def test_long_heads_and_blocks(shape, dtype):
    assert_as_exact_as_pytorch(PLAIN | shape | {"heads": (1, 1)}, dtype)


def test_blocks_that_no_tile_holds_are_refused():
    q, k, v = torch.randn(3, 1, 1, 300, 80)
    with pytest.raises(ValueError, match="block_size=255 and heads of 80 numbers do not fit"):
        landmark_attention(q, k, v, Window(255), backend="triton")


def test_deterministic_algorithms_take_the_pair_of_kernels(monkeypatch):
    launched = []
    monkeypatch.setattr(operators, "launch", lambda kernel, *_, **__: launched.append(kernel))
    monkeypatch.setattr(operators, "_means", lambda *_: None)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            run(PLAIN, "triton", torch.float16)
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
    attend = functools.partial(landmark_attention, layout=Window(6), backend="triton")
    expected = attend(q.contiguous(), k.contiguous(), v.contiguous())
    torch.testing.assert_close(attend(q, k, v), expected)
    backwards = [x.flip(-1).transpose(2, 3).contiguous().transpose(2, 3).flip(-1) for x in (q, k, v)]
    torch.testing.assert_close(attend(*backwards), expected)


@pytest.mark.parametrize("layout", [Window(6), Packed(6, None, torch.tensor([0, 12, 30], dtype=torch.int32))])
def test_compiles_as_one_graph(layout):
    q, k, v = (torch.randn(1, 2, 30, 8, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        out, lse = landmark_attention(q * 2, k, v, layout, backend="triton")
        return out * 2 + lse[..., None]

    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    expected = attend(q, k, v)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("extra", [False, True])
def test_operator_passes_opcheck(extra):
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    phase = torch.zeros(1, dtype=torch.int32)
    place = torch.randn(1, 2, 20, requires_grad=True), torch.ones(1, 3, dtype=torch.int8)
    arguments = (q, k, v, phase, None, *(place if extra else (None, None)), 6, 0, 0.3, 0.0 if extra else 1.0)
    torch.library.opcheck(torch.ops.landmark.attention.default, arguments)


@pytest.mark.parametrize("cmt", [False, True])
def test_activation_checkpointing_changes_nothing(cmt):
    leaves = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    leaves += [torch.randn(2, 8, requires_grad=True)] if cmt else []

    def attend(q, k, v, key=None):
        extra = None if key is None else ContextMiss(key)
        return landmark_attention(q, k, v, Window(6), extra=extra, backend="triton")[0]

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
            extra = ContextMiss(torch.empty(2, 8, device="cuda")) if cmt else None
            landmark_attention(q, q, q, Window(6, given), extra=extra, backend="triton")
    assert copies.number == 1


def test_scores_too_large_for_exact_differences_have_finite_gradients():
    shape = PLAIN | {"queries": 40, "block_size": 6, "phase": "cut"}
    for backend in ("triton", "blockwise"):
        found = run(shape, backend, torch.float32, scale=1e10)
        assert all(bool(x[x != -torch.inf].isfinite().all()) for x in found), backend


def test_unsupported_inputs_are_refused(monkeypatch):
    q = torch.randn(1, 1, 8, 4)
    with pytest.raises(ValueError, match="backend=triton: q must be of type torch.float32"):
        landmark_attention(q.double(), q.double(), q.double(), Window(3), backend="triton")
    with pytest.raises(ValueError, match="backend=triton: scale must be positive, got 0"):
        landmark_attention(q, q, q, Window(3), scoring=Scoring(0.0), backend="triton")
    with pytest.raises(ValueError, match="must have one type, got torch.float32, torch.float32, torch.float16"):
        landmark_attention(q, q, q.half(), Window(3), backend="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="backend=triton needs a GPU"):
        landmark_attention(q, q, q, Window(3), backend="triton")


GPUS = {name: Gpu(*limits) for name, limits in {"T4": (75, 64 << 10), "RTX 3090": (86, 99 << 10)}.items()}
GPUS |= {"A100": A100, "H100": Gpu(90, 227 << 10), "RTX 5090": Gpu(120, 99 << 10)}


def test_tiles_of_newer_gpus(monkeypatch):
    monkeypatch.setattr(tuning, "gpu_of", lambda device: GPUS["H100"])
    assert choices("forward", 31, 16, 2, GPUS["H100"], cmt=False)[0].group > 1
    assert_as_exact_as_pytorch(PLAIN | {"heads": (1, 1), "queries": 450, "block_size": 31}, torch.float16)


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


@pytest.mark.parametrize(
    ("arch", "cases"),
    [
        ("sm_80", ["128 50 joint", "64 63 cmt", "64 63 packed"]),
        ("sm_90", ["64 50", "128 63", "128 63 float32", "128 50 cmt packed", "128 127", "256 63"]),
    ],
)
def test_no_register_is_spilled_and_shared_memory_suffices(arch, cases):
    command = [sys.executable, "-m", "benchmarks.compiled_kernels", arch, *cases]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == cases
    for case, kernels in found.items():
        for kernel, used in kernels.items():
            spilled = 64 if (arch, case, kernel) == ("sm_80", "64 63 cmt", "backward_keys") else 0
            spilled = 256 if (arch, kernel) == ("sm_90", "backward") else spilled  # and is faster so
            assert used["stack"] <= (272 if "float32" in case else spilled), (case, kernel, used)
            assert used["shared"] <= used["allowed"], (case, kernel, used)
            by_groups = arch == "sm_90" and "float32" not in case and not kernel.startswith(("top_k", "block_scores"))
            if case in ("128 127", "256 63"):  # these have fewer queries than a group of warps multiplies
                by_groups = kernel in ("forward", "backward_queries")
            no_products = kernel.endswith(("shared=False", "rows=1", "means", "splits", "of_tiles", "tokens"))
            assert (used["by_warps"] == 0) == (by_groups or no_products), (case, kernel, used)


def test_tiles_hold_whole_blocks():
    for block_size in range(1, 256):
        for chosen in choices("forward", block_size, 64, 2, GPUS["H100"], cmt=False):
            assert chosen.segment >= block_size + 1
            assert chosen.group * chosen.segment == max(64, chosen.segment)
