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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import landmark.attention
from landmark.attention import ContextMiss, Window, backend_for, landmark_attention, place_phase
from landmark.attention.fused import operators, tuning
from landmark.attention.fused.tuning import A100, KERNELS, Gpu, choices, shared_memory
from landmark.attention.rotary import _is_within, rotary_factors, rotate, rotation
from tests.attention.test_landmark_attention import arguments, leaves_of, run
from tests.pairs import all_pairs, name_of

ROOT = Path(__file__).parents[2]
SHAPES = all_pairs(
    {
        "heads": [(1, 1), (4, 2)],
        "queries": [1, 9, 40],
        "prefix": [0, 5, 33],
        "lengths": [None, [60], [0, 31, 1, 8]],
        "dim": [4, 20],
        "block_size": [1, 4, 15],
        "phase": [None, "cut", "on a landmark"],
        "extra": [None, "controlled", "sinks"],
        "alpha": [0.0, 0.5, 1.0],
    },
    lambda case: (
        (not case["prefix"] or case["lengths"] is None) and (not case["alpha"] or case["extra"] != "controlled")
    ),
)
OTHERS = [  # shape, type, whether one kernel computes all gradients
    *((shape, torch.float32, True) for shape in [x for x in SHAPES if not x["extra"]][:6]),
    *(({"dim": 16, "block_size": 10, "alpha": alpha}, torch.float32, True) for alpha in (0.5, 1.0)),
    ({"dim": 128, "block_size": 50, "heads": (1, 1)}, torch.float32, False),
    ({"dim": 20, "block_size": 127, "queries": 70, "heads": (1, 1)}, torch.float32, False),
    ({"dim": 16, "block_size": 10}, torch.bfloat16, False),
    ({"dim": 16, "block_size": 50, "queries": 90, "alpha": 0.5}, torch.bfloat16, False),
    ({"dim": 16, "block_size": 50, "queries": 90}, torch.float16, False),
    ({"dim": 16, "block_size": 10, "alpha": 1.0}, torch.float16, False),
]


def assert_as_exact_as_pytorch(shape, dtype):
    """No further from float64 than twice what plain PyTorch is in the same precision, or than rounding a few times."""
    exact = run(shape, "reference", dtype, torch.float64)
    plain, ours = run(shape, "reference", dtype), run(shape, "triton", dtype)
    for name, c in exact.items():
        assert torch.equal(ours[name].isinf(), c.isinf()), name
        off, plainly = ((x[name].double() - c).masked_fill(c.isinf(), 0.0).abs().max().item() for x in (ours, plain))
        rounding = 16 * torch.finfo(dtype).eps * (1 + c.masked_fill(c.isinf(), 0.0).abs().max().item())
        assert off <= max(2 * plainly, rounding), f"{name}: {off:.1e}, plain PyTorch {plainly:.1e}"


@contextmanager
def in_one():
    """One kernel computes all gradients in float32 too, as it does in half precision on GPUs."""
    asked = []

    def as_in_half_precision(kernel, block_size, dim, element_size, gpu, cmt):
        asked.extend([kernel] * (not cmt))  # that there are tiles with the token, too, is asked before
        return choices(kernel, block_size, dim, 2 if kernel == "backward" else element_size, gpu, cmt)

    with mock.patch.object(tuning, "choices", as_in_half_precision):
        yield
    assert "backward" in asked
    assert "backward_keys" not in asked


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_outputs_and_gradients_of_any_shape(shape, new_memory_is_nan):
    assert_as_exact_as_pytorch(shape, torch.float32)


@pytest.mark.parametrize(("shape", "dtype", "is_in_one"), OTHERS)
def test_one_kernel_for_all_gradients_half_precision_long_heads_and_blocks(shape, dtype, is_in_one):
    with in_one() if is_in_one else mock.patch.dict({}):
        assert_as_exact_as_pytorch(shape, dtype)


def test_tiles_of_newer_gpus(monkeypatch):
    monkeypatch.setattr(tuning, "gpu_of", lambda device: GPUS["H100"])
    assert choices("forward", 31, 16, 2, GPUS["H100"], cmt=False)[0].group > 1
    assert_as_exact_as_pytorch({"dim": 16, "heads": (1, 1), "queries": 450, "block_size": 31}, torch.float16)


def test_deterministic_algorithms_take_the_pair_of_kernels(monkeypatch):
    launched = []
    monkeypatch.setattr(operators, "launch", lambda kernel, *_, **__: launched.append(kernel))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            run({}, "triton", torch.float16)
        finally:
            torch.use_deterministic_algorithms(False)
    run({"extra": "controlled"}, "triton", torch.float16)
    pair = ["forward", "backward_queries", "backward_keys"]
    assert launched == ["forward", "backward", *pair, *pair]


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("triton", {}),
        ("triton", {"lengths": [12, 18], "phase": None}),
        ("blockwise", {"dtype": torch.bfloat16}),
        ("blockwise", {"extra": "sinks", "lengths": [11, 0, 19]}),
    ],
)
def test_attention_can_be_compiled_and_checkpointed(backend, case):
    """Outputs, log-sum-exps and gradients are those without either. Kernels are part of one graph."""
    case = {"queries": 30, "dim": 8, "prefix": 0, **case}
    leaves = leaves_of(case, case.get("dtype", torch.float32))
    qkv, given = [leaves[name] for name in "qkv"], arguments(case, leaves)

    def doubled(q, k, v):
        out, lse = landmark_attention(q * 2, k, v, **given, backend=backend)
        return out * 2, lse

    compiled = torch.compile(doubled, fullgraph=backend == "triton", backend="aot_eager")
    for found in (compiled(*qkv), checkpoint(doubled, *qkv, use_reentrant=False)):
        plain = doubled(*qkv)
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
        totals = [out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum() for out, lse in (found, plain)]
        ours, expected = (torch.autograd.grad(x, list(leaves.values())) for x in totals)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("extra", [False, True])
def test_operators_pass_opcheck(extra):
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    place = torch.randn(1, 2, 20, requires_grad=True), torch.ones(1, 3, dtype=torch.int8)
    place = (*(place if extra else (None, None)), 6, 0, 0.3, 0.0 if extra else 1.0)
    of_windows = (q, k, v, torch.zeros(1, dtype=torch.int32), None, *place)
    torch.library.opcheck(torch.ops.landmark.attention.default, of_windows)
    torch.library.opcheck(rotation, (q, torch.randn(20, 4, 2), extra))


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


@pytest.mark.parametrize("backend", ["triton", "blockwise"])
def test_scores_too_large_for_exact_differences_have_finite_gradients(backend):
    for x in run({"dim": 16, "phase": "cut"}, backend, torch.float32, scale=1e10).values():
        assert bool(x[x != -torch.inf].isfinite().all())


@pytest.mark.parametrize("layout", ["heads first", "rows first", "part of a projection"])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 6), (torch.float16, 16)])
def test_rotates_as_complex_numbers_do_with_gradients(layout, dtype, dim):
    x = torch.randn(2, 3, 37, dim).to(dtype)
    if layout != "heads first":
        wide = torch.randn(2, 37, 9 if layout == "part of a projection" else 3, dim).to(dtype)
        x = wide.transpose(1, 2)[:, :3]
    x = x.detach().requires_grad_()
    gradient = torch.randn(2, 3, 37, dim).to(dtype)
    tolerance = {"atol": 2 * torch.finfo(dtype).eps, "rtol": 2 * torch.finfo(dtype).eps}
    for positions in (torch.arange(37), torch.randint(0, 500, (2, 1, 37)), torch.tensor([5])):
        factors = rotary_factors(positions, dim, 100.0, dtype)
        assert _is_within(factors.shape, x.shape)
        found = [rotation(x, torch.view_as_real(factors), False), rotate(x, factors)]
        found = [(y, torch.autograd.grad(y, x, gradient)[0]) for y in found]
        torch.testing.assert_close(*found, **tolerance)
    for factors, x in (((3, 1, 5, 1, 4), (2, 5, 3, 8)), ((2, 1, 5, 4), (1, 3, 5, 8)), ((5, 4), (2, 3, 5, 16))):
        assert not _is_within(torch.Size(factors), torch.Size(x)), "these would enlarge x"


GPUS = {name: Gpu(*limits) for name, limits in {"T4": (75, 64 << 10), "RTX 3090": (86, 99 << 10)}.items()}
GPUS |= {"A100": A100, "H100": Gpu(90, 227 << 10), "RTX 5090": Gpu(120, 99 << 10)}


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


def test_no_choice_exceeds_the_shared_memory_of_a_gpu_and_tiles_hold_whole_blocks():
    """The largest that was seen to exceed it: 90,112 bytes and more on 101,376, with the tiles of larger GPUs."""
    for block_size in range(1, 256):
        for chosen in choices("forward", block_size, 64, 2, GPUS["H100"], cmt=False):
            assert chosen.segment >= block_size + 1
            assert chosen.group * chosen.segment == max(64, chosen.segment)
    for gpu in GPUS.values():
        for kernel, block_size, dim, size in itertools.product(KERNELS, (15, 63, 127), (64, 128, 256), (2, 4)):
            for tiles in choices(kernel, block_size, dim, size, gpu, cmt=False):
                assert shared_memory(kernel, tiles, dim, size) <= gpu.shared_memory
    narrow = choices("backward_keys", 63, 256, 2, GPUS["RTX 3090"], cmt=False)[0]
    assert narrow.queries < choices("backward_keys", 63, 256, 2, A100, cmt=False)[0].queries


@pytest.mark.parametrize(
    ("arch", "cases"),
    [
        ("sm_80", ["128 50 joint", "64 63 cmt", "64 63 packed", "64 32 tiles capped"]),
        ("sm_100", ["64 32 tiles", "256 32 tiles capped"]),
        ("sm_90", ["128 32 tiles", "128 63", "128 63 float32", "128 50 cmt packed", "128 127", "256 63"]),
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
            spilled = 8 if (arch, case, kernel) == ("sm_100", "64 32 tiles", "read_blocks") else spilled
            assert used["stack"] <= (272 if "float32" in case else spilled), (case, kernel, used)
            assert used["shared"] <= used["allowed"], (case, kernel, used)
            by_groups = arch != "sm_80" and "float32" not in case and not kernel.startswith(("top_k", "read_keys"))
            if case in (
                "128 127",
                "256 63",
                "256 32 tiles capped",
            ):  # these have fewer queries than a group of warps multiplies
                by_groups = kernel in ("forward", "backward_queries")
            no_products = kernel.endswith(
                ("shared=False", "rows=1", "means", "splits", "of_tiles", "tokens", "append", "largest_shares")
            )
            assert (used["by_warps"] == 0) == (by_groups or no_products), (case, kernel, used)
