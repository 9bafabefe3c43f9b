"""What the kernels compute, against the equations in float64.

The error of a kernel may be twice that of the same equations in plain PyTorch in the kernel's type, or that of
rounding a few times. It is relative: the norm of the difference by that of the exact tensor.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.exactness import FLOAT32_FACTOR
from benchmarks.gpu.journal import Line
from benchmarks.gpu.shapes import Scale, Shape, deterministic
from benchmarks.gpu.work import summary
from landmark.attention import ContextMiss, Grouped, Layout, Packed, Sinks, Window, landmark_attention
from landmark.attention.fused import tuning
from landmark.attention.fused.rotation import ROWS
from landmark.attention.plain import attention_forward
from landmark.attention.rotary import rotary_factors, rotation
from landmark.memory import Memory, Store
from landmark.memory.landmarks.select import Best, Newest
from landmark.memory.landmarks.select.scores_kernels import top_k_landmarks
from landmark.memory.landmarks.settings import GRANULARITIES, TIERS

NAMES = "out", "lse", "dq", "dk", "dv", "dextra"
ROUNDING = 8  # times the type's precision
Tensors = Sequence[Tensor]


def line(what: str, check: Callable[[], Line]) -> Line:
    """The line of a check: what it returns, or its error. A fault of the device is raised: nothing can follow it."""
    try:
        return {"kind": "check", "what": what, **check()}
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        return {"kind": "check", "what": what, "ok": False, "error": summary(error)}


def against_exact(ours: Tensors, plain: Tensors, exact: Tensors, names: Sequence[str] = NAMES) -> Line:
    """The tensor of ours whose error is largest by what it may be. plain: in ours' type; exact: in float64."""
    found = []
    for name, a, b, c in zip(names, ours, plain, exact, strict=False):
        error, allowed = off(a, c), max(FLOAT32_FACTOR * off(b, c), ROUNDING * torch.finfo(b.dtype).eps)
        found.append((not error <= allowed, error / allowed, name, error, allowed))
    wrong, _, name, error, allowed = max(found, key=lambda each: (each[0], each[1]))
    number = f"{error:.2e}" if error == error else "NaN"
    return {"ok": not wrong, "tensor": name, "off": number, "allowed": f"{allowed:.2e}"}


def off(x: Tensor, exact: Tensor) -> float:
    """The relative error; NaN where other numbers are infinite. −∞ is exact where it should be."""
    x = x.double()
    if not torch.equal(x.isinf(), exact.isinf()):
        return float("nan")
    x, exact = (each.masked_fill(exact.isinf(), 0.0) for each in (x, exact))
    return float((x - exact).norm() / exact.norm().clamp(min=1e-30))


def same(ours: Tensors, theirs: Tensors) -> Line:
    """Whether tensors are equal, bit for bit."""
    return {"ok": all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))}


@dataclass(frozen=True)
class Case:
    """Attention with its gradients. leaves: q, k, v and the numbers of the extra place, if there is one. grad: of the
    output. extra: makes the extra place of its numbers. alpha: of the gate.
    """

    leaves: list[Tensor]
    grad: Tensor
    layout: Layout
    extra: Callable[[Tensor], ContextMiss | Sinks] | None = None
    alpha: float = 0.0

    def computed(self, backend: str, dtype: torch.dtype) -> list[Tensor]:
        """Output, log-sum-exp and all gradients."""
        leaves = [_as(x, dtype) for x in self.leaves]
        extra = None if self.extra is None else self.extra(leaves[3])
        (q, k, v), gate = leaves[:3], Grouped(self.alpha)
        out, lse = landmark_attention(q, k, v, self.layout, gate=gate, extra=extra, backend=backend)
        seen = lse.masked_fill(lse.isinf(), 0.0)
        grads = self.grad.to(dtype), torch.ones_like(seen).cumsum(-1) / seen.shape[-1]
        return [out.detach(), lse.detach(), *torch.autograd.grad([out, seen], leaves, grads)]

    @property
    def dtype(self) -> torch.dtype:
        return self.leaves[0].dtype

    @cached_property
    def _expected(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.computed("reference", self.dtype), self.computed("reference", torch.float64)

    def check(self) -> Line:
        return against_exact(self.computed("triton", self.dtype), *self._expected)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A leaf of another type in the same places of memory: its strides are part of a case."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device).copy_(x.detach()).requires_grad_()


def shape_of(scale: Scale, dim: int, width: int, group: int = 1) -> Shape:
    return Shape(2, scale.check_heads, group, scale.check_length, dim, width)


def windows(scale: Scale, shape: Shape, dtype: torch.dtype) -> Case:
    leaves, grad = shape.inputs(scale, dtype)
    return Case(leaves, grad, Window(shape.width - 1, shape.phase))


def tiles(kernels: Sequence[str], dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Every choice of the tuner for these kernels, forced."""
    case = windows(scale, shape_of(scale, dim, width), dtype)
    gpu = tuning.gpu_of(torch.device(scale.device))
    for kernel in kernels:
        for chosen in tuning.choices(kernel, width - 1, dim, dtype.itemsize, gpu, False):
            with forced(kernel, chosen), deterministic() if kernel in tuning.PAIR else nullcontext():
                yield line(f"{kernel} {about(chosen)}", case.check)


def about(chosen: tuning.Tiles) -> str:
    """The sizes of tiles, in words."""
    return f"M={chosen.queries} keys={chosen.segment * chosen.group} warps={chosen.warps} stages={chosen.stages}"


def forced(kernel: str, chosen: tuning.Tiles):
    """A context in which a kernel has these tiles alone."""
    choices = tuning.choices

    def one(name: str, *of_shape, **given) -> tuple[tuning.Tiles, ...]:
        return (chosen,) if name == kernel else choices(name, *of_shape, **given)

    return mock.patch.object(tuning, "choices", one)


def layouts(dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Heads that share keys, with default tiles: where windows begin and end, and how their numbers are stored."""
    shape = shape_of(scale, dim, width, scale.check_group)
    plain = windows(scale, shape, dtype)
    (q, k, v), grad, before = plain.leaves, plain.grad, shape.length // 3
    documents = torch.tensor([0, 5, 5, shape.length // 2, shape.length], dtype=torch.int32, device=scale.device)
    packed = Packed(width - 1, torch.tensor([0, 1, 1, width - 1]), documents)
    by_token = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in plain.leaves]
    apart = [torch.stack([x.detach(), x.detach()], 3)[:, :, :, 1] for x in plain.leaves]
    found = {
        "phases": plain,
        "a prefix": Case([q[:, :, before:], k, v], grad[:, :, before:], Window(width - 1, shape.phase, before)),
        "one query": Case([q[:, :, -1:], k, v], grad[:, :, -1:], Window(width - 1, prefix=shape.length - 1)),
        "packed documents": Case([x[:1] for x in plain.leaves], grad[:1], packed),
        "tokens before heads": replace(plain, leaves=by_token),
        "every other row": replace(plain, leaves=apart),
    }
    for name, case in found.items():
        yield line(name, case.check)


def softmaxes(dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Heads that share keys, with default tiles: other gates, and places without a value."""
    shape = shape_of(scale, dim, width, scale.check_group)
    plain = windows(scale, shape, dtype)
    generator = torch.Generator(scale.device).manual_seed(1)
    made = partial(torch.randn, device=scale.device, generator=generator)
    key, sinks = made(shape.heads // shape.group, dim).to(dtype), made(shape.heads).to(dtype)
    controlled = torch.arange(shape.length // width + 2, device=scale.device).expand(2, -1) % 3 > 0
    found = {
        "α=0.5": replace(plain, alpha=0.5),
        "α=1": replace(plain, alpha=1.0),
        "a context miss token": replace(
            plain, leaves=[*plain.leaves, key], extra=partial(ContextMiss, controlled=controlled)
        ),
        "sinks": replace(plain, leaves=[*plain.leaves, sinks], extra=Sinks),
    }
    for name, case in found.items():
        yield line(name, case.check)


def pair(dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """The deterministic kernels, twice, and beside the kernel that computes all gradients."""
    case = windows(scale, shape_of(scale, dim, width), dtype)
    in_one = case.computed("triton", dtype)
    with deterministic():
        once, twice = (case.computed("triton", dtype) for _ in range(2))
    yield line("twice the same, bit for bit", lambda: same(once, twice))
    beside = once, [x.to(dtype) for x in in_one], [x.double() for x in in_one]
    yield line("as one kernel", partial(against_exact, *beside))


def rotations(scale: Scale) -> Iterator[Line]:
    """Of more programs than 65,535, which one axis of a grid alone can have, and their gradient."""
    dim, length = scale.dims[0], 66 * ROWS - 5
    batch, heads = (64, 16) if scale.is_gpu else (1, 1)
    for dtype in scale.dtypes:
        x = torch.randn(batch, heads, length, dim, device=scale.device).to(dtype).requires_grad_()
        factors = torch.view_as_real(rotary_factors(torch.arange(length, device=scale.device), dim, 1e4, dtype))
        grad = torch.randn_like(x)

        def check(x: Tensor = x, factors: Tensor = factors, grad: Tensor = grad) -> Line:
            out = rotation(x, factors, False)
            ours = out.detach(), torch.autograd.grad(out, x, grad)[0]
            with torch.no_grad():
                exact = [_turned(y, factors.double(), sign) for y, sign in ((x, 1), (grad, -1))]
                plain = [y.to(x.dtype) for y in exact]
            return against_exact(ours, plain, exact, ("out", "dx"))

        yield line(f"{-(-length // ROWS) * batch * heads} programs, {dtype}", check)


def _turned(x: Tensor, factors: Tensor, sign: int) -> Tensor:
    """Pairs turned by their angles times the sign, in float64."""
    even, odd = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = factors[..., 0], factors[..., 1] * sign
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)


def best_landmarks(scale: Scale) -> Iterator[Line]:
    """The best landmarks, where most scores are tied and a ring of rows has wrapped."""
    capacities = (5000, 4097) if scale.is_gpu else (70, 65)
    for queries, heads, kv_heads, recent, k in ((1, 8, 8, 4, 4), (1, 8, 2, 5, 4), (9, 8, 2, 0, 16)):
        for capacity, added in zip(capacities, (capacities[0], 3 * capacities[1] + 7), strict=True):
            check = partial(_same_as_sorted, scale, queries, heads, kv_heads, recent, k, capacity, added)
            ring = "wrapped" if added > capacity else "not wrapped"
            yield line(f"T={queries} H={heads}/{kv_heads} k={k}, {capacity} rows, {ring}", check)


def _same_as_sorted(
    scale: Scale, queries: int, heads: int, kv_heads: int, recent: int, k: int, capacity: int, added: int
) -> Line:
    """Whether the best blocks are those of a sort by score and recency; scores are small integers, so exact."""
    generator = torch.Generator(scale.device).manual_seed(0)
    made = partial(torch.randint, -1, 2, generator=generator, device=scale.device)
    rotated = made((recent + 1, 2, queries, heads, scale.dims[0])).float()
    landmarks = made((2, kv_heads, capacity, scale.dims[0])).float()
    ours = top_k_landmarks(rotated, landmarks, added=added, recent=recent, k=k)
    rows = torch.arange(capacity, device=scale.device)
    ages = (added - 1 - rows) % capacity + 1
    keys = landmarks.repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("bthd,bhnd->bhtn", rotated[-1], keys)
    for age in range(1, recent + 1):
        row = (added - age) % capacity
        scores[..., row] = torch.einsum("bthd,bhd->bht", rotated[age - 1], keys[:, :, row])
    order = (scores.double() * 2**32 - ages).topk(k, -1).indices
    return same([ours.sort(-1).values], [ages[order].sort(-1).values])


def with_weights(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, with all weights in memory at once."""
    scores = q.to(torch.promote_types(q.dtype, torch.float32)) @ k.to(torch.promote_types(k.dtype, torch.float32)).mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1) if causal else torch.tensor(False)
    scores = (scores * scale).masked_fill(hidden.to(q.device), -torch.inf)
    return (scores.softmax(-1) @ v.to(scores.dtype)).to(q.dtype), scores.logsumexp(-1)


def parts(scale: Scale) -> Iterator[Line]:
    """PyTorch's attention that returns its log-sum-exp, by which attention to parts is merged."""
    made = partial(torch.randn, device=scale.device, generator=torch.Generator(scale.device).manual_seed(0))
    for dtype, dim in product(scale.dtypes, (64, 80, 256) if scale.is_gpu else scale.dims):
        for batch, length, keys, causal in ((2, 11, 18, False), (1, 1, 3000, False), (1, 300, 300, True)):
            q, k, v = (made(batch, 4, size, dim).to(dtype) for size in (length, keys, keys))
            how = {"scale": dim**-0.5, "causal": causal}

            def check(q: Tensor = q, k: Tensor = k, v: Tensor = v, how: dict[str, Any] = how) -> Line:
                plain = [x.to(q.dtype) for x in with_weights(q, k, v, **how)]
                exact = with_weights(q.double(), k.double(), v.double(), **how)
                return against_exact(attention_forward(q, k, v, **how), plain, exact)

            yield line(f"{length} queries, {keys} keys{', causal' * causal}, d={dim}, {dtype}", check)


def retrieved(dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Chunks that read the blocks they retrieve: the newest, which do not depend on rounding."""
    shape = Shape(2, scale.check_heads, scale.check_group, 4 * width + 5, dim, width)
    inputs, lengths = shape.inputs(scale, dtype)[0], [2 * width + 1, width + 1, width + 1, 1, 1]

    def read(granularity: str, alpha: float, backend: str, kind: torch.dtype) -> list[Tensor]:
        memory = Memory(width - 1, k=2, select=Newest(granularity), gate=Grouped(alpha), backend=backend)
        return [_in_chunks(memory, *(x.detach().to(kind) for x in inputs), lengths=lengths)]

    def check(granularity: str, alpha: float) -> Line:
        kinds = ("triton", dtype), ("reference", dtype), ("reference", torch.float64)
        ours, plain, exact = (read(granularity, alpha, *kind) for kind in kinds)
        return against_exact(ours, plain, exact)

    for granularity, alpha in zip(GRANULARITIES, (0.0, 0.5, 1.0, 0.0), strict=True):
        yield line(f"{granularity}, α={alpha:g}", partial(check, granularity, alpha))


def _in_chunks(memory: Memory, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    outs = []
    for queries, keys, values in zip(*(x.split(list(lengths), 2) for x in (q, k, v)), strict=True):
        outs.append(memory.attend(1, queries, keys, values))
        memory.commit()
    return torch.cat(outs, 2)


def tiers(scale: Scale) -> Iterator[Line]:
    """The same numbers from every tier, where another stream than the default one computes."""
    dim, width = scale.dims[0], scale.widths[-1]
    shape = Shape(1, scale.check_heads, scale.check_group, 10 * width, dim, width)
    q, k, v = (x.detach() for x in shape.inputs(scale, scale.half)[0])

    def read(tier: str) -> Tensor:
        with tempfile.TemporaryDirectory() as folder, _other_stream(scale):
            memory = Memory(width - 1, k=2, select=Best(), store=Store(None, tier, folder, cache=3), backend="triton")
            return _in_chunks(memory, q, k, v, [4 * width, 4 * width, 1, 1, 2 * width - 2])

    for tier in TIERS[1:]:
        yield line(f"{tier} as device", lambda tier=tier: same([read(tier)], [read("device")]))


@contextmanager
def _other_stream(scale: Scale) -> Iterator[None]:
    """A context in which another stream computes, between what was launched before and what is launched after."""
    if not scale.is_gpu:
        yield
        return
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
