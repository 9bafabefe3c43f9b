"""The Triton kernels against their equations in float64, for `benchmarks.gpu`.

The relative error of a tensor may be twice that of the same equations in plain PyTorch in the kernel's type, or a few
roundings. A check is a function that yields a line for each case; `Scale` has the shapes.
"""

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.settings import BLOCK_SIZE, Headless, decoder
from landmark.attention import ContextMiss, Grouped, Packed, Scoring, Sinks, Window, landmark_attention
from landmark.attention.fused import tuning
from landmark.attention.fused.rotation import ROWS
from landmark.attention.rotary import rotary_factors, rotation
from landmark.memory import Memory, Store
from landmark.memory.blocks.attention import (
    AttentionConfig,
    Text,
    block_rope_factors,
    blocks_of_queries,
    read_chosen,
    rotated_summaries,
)
from landmark.memory.blocks.cache import BlockCache, rotate_by
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.select import Best, Newest
from landmark.memory.landmarks.select.scores_kernels import top_k_landmarks
from landmark.memory.landmarks.settings import GRANULARITIES
from landmark.memory.landmarks.step import NextToken
from landmark.models.head_loss import head_loss
from landmark.models.language_model import summed_loss
from landmark.utils.constants import NO_LOSS, TIERS

ROUNDING = {torch.float32: 16, torch.bfloat16: 8, torch.float16: 8}  # times the type's precision
NEAR_TIES = 0.1  # of the queries in half precision, at most, that choose other blocks than in float64
Line = dict[str, Any]
Compute = Callable[[bool, torch.dtype], Sequence[Tensor]]  # by kernels or in plain PyTorch; in which type


@dataclass(frozen=True)
class Scale:
    """What is measured where. device: of all. dtypes, dims, widths: types, d, and W = ℓ + 1. length, heads, group: of
    checks, T, H, and query heads of a key head. tokens, width: of timings, B·T and H·d. rounds: of a timing, at most.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, ...]
    widths: tuple[int, ...]
    length: int
    heads: int
    group: int
    tokens: int
    width: int
    rounds: int

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    def normal(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers, the same every time."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, device=self.device, generator=generator).to(dtype)


GPU = Scale("cuda", (torch.bfloat16, torch.float32, torch.float16), (128, 64), (64, 51), 515, 16, 4, 65_536, 2048, 15)
TINY = Scale("cpu", (torch.float16, torch.float32), (16,), (8,), 21, 2, 2, 48, 32, 3)


def compared(what: str, compute: Compute, dtype: torch.dtype, ties: float = 0.0) -> Line:
    """The tensor whose error is largest by what it may be. ties: share of rows that need not be right."""
    found = []
    ours, plain, exact = compute(True, dtype), compute(False, dtype), compute(False, torch.float64)
    for number, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
        error, allowed = off(a, c, ties), max(2 * off(b, c, ties), ROUNDING[dtype] * torch.finfo(dtype).eps)
        found.append((not error <= allowed, error / allowed, number, error, allowed))
    wrong, _, number, error, allowed = max(found)
    return {"what": what, "ok": not wrong, "tensor": number, "off": f"{error:.2e}", "allowed": f"{allowed:.2e}"}


def off(x: Tensor, exact: Tensor, ties: float = 0.0) -> float:
    """The relative error; NaN where other numbers are infinite."""
    x, exact = x.double(), exact.double()
    if not torch.equal(x.isinf(), exact.isinf()):
        return float("nan")
    x, exact = (each.masked_fill(exact.isinf(), 0.0) for each in (x, exact))
    rows = torch.atleast_1d((x - exact).norm(dim=-1)).flatten().sort().values
    return float(rows[: len(rows) - int(ties * len(rows))].norm() / exact.norm().clamp(min=1e-30))


def same(what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Line:
    return {"what": what, "ok": all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))}


def about(dtype: torch.dtype, dim: int, width: int | None = None) -> str:
    return f"{str(dtype).removeprefix('torch.')} d={dim}" + ("" if width is None else f" W={width}")


def leaves_of(scale: Scale, shape: Sequence[int], group: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the output. shape: (B, H, T, d)."""
    batch, heads, *rest = shape
    sizes = (batch, heads), (batch, heads // group), (batch, heads // group), (batch, heads)
    q, k, v, grad = (scale.normal(*size, *rest, seed=seed, dtype=dtype) for seed, size in enumerate(sizes))
    return [q, k, v], grad


def attention(
    leaves: Sequence[Tensor], grad: Tensor, layout: Window | Packed, alpha: float = 0.0, extra: Any = None
) -> Compute:
    """Output, log-sum-exp and gradients. extra: makes the extra place of the fourth of the leaves."""

    def compute(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        # Their strides are a part of the case.
        made = [torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device).copy_(x) for x in leaves]
        q, k, v, *others = (x.requires_grad_() for x in made)
        how = {"gate": Grouped(alpha), "extra": extra(*others) if extra else None}
        out, lse = landmark_attention(q, k, v, layout, **how, backend="triton" if by_kernels else "reference")
        seen = lse.masked_fill(lse.isinf(), 0.0)
        weights = torch.ones_like(seen).cumsum(-1) / seen.shape[-1]
        return [out.detach(), lse.detach(), *torch.autograd.grad([out, seen], made, [grad.to(dtype), weights])]

    return compute


def windows(dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Heads that share keys, with default tiles: places, strides, gates, and the deterministic kernels."""
    shape, device = (2, scale.heads, scale.length, dim), scale.device
    (q, k, v), grad = leaves_of(scale, shape, scale.group, dtype)
    phase = torch.arange(2) * (width - 1) % width
    plain, before, window = [q, k, v], scale.length // 3, Window(width - 1, phase)
    documents = torch.tensor([0, 5, 5, scale.length // 2, scale.length], dtype=torch.int32, device=device)
    controlled = torch.arange(scale.length // width + 2, device=device).expand(2, -1) % 3 > 0
    key, sinks = (scale.normal(*size, seed=9, dtype=dtype) for size in ((k.shape[1], dim), (scale.heads,)))
    late = q[:, :, before:], grad[:, :, before:]
    cases = {
        "phases": attention(plain, grad, window),
        "a prefix": attention([late[0], k, v], late[1], Window(width - 1, phase, before)),
        "one query": attention([q[:, :, -1:], k, v], grad[:, :, -1:], Window(width - 1, prefix=scale.length - 1)),
        "packed": attention(
            [x[:1] for x in plain], grad[:1], Packed(width - 1, torch.tensor([0, 1, 1, width - 1]), documents)
        ),
        "every other row": attention([torch.stack([x, x], 3)[:, :, :, 1] for x in plain], grad, window),
        "tokens before heads": attention([x.mT.contiguous().mT for x in plain], grad, window),
        "α=0.5": attention(plain, grad, window, alpha=0.5),
        "α=1": attention(plain, grad, window, alpha=1.0),
        "context miss": attention([*plain, key], grad, window, extra=partial(ContextMiss, controlled=controlled)),
        "sinks": attention([*plain, sinks], grad, window, extra=Sinks),
    }
    for what, compute in cases.items():
        yield compared(what, compute, dtype)
    with deterministic():
        yield same("deterministic: twice the same", *(cases["phases"](True, dtype) for _ in range(2)))
        yield compared("deterministic", cases["phases"], dtype)


def tiles(dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Every choice of the tuner for each kernel, forced."""
    leaves, grad = leaves_of(scale, (2, scale.heads, scale.length, dim), 1, dtype)
    compute = attention(leaves, grad, Window(width - 1, torch.arange(2) * (width - 1) % width))
    gpu = tuning.gpu_of(torch.device(scale.device))
    for kernel in tuning.KERNELS:
        for chosen in tuning.choices(kernel, width - 1, dim, dtype.itemsize, gpu, False):
            with forced(kernel, chosen), deterministic() if kernel in tuning.PAIR else nullcontext():
                yield compared(f"{kernel} {chosen}", compute, dtype)


def forced(kernel: str, chosen: tuning.Tiles) -> AbstractContextManager:
    """A context in which a kernel has these tiles alone."""
    choices = tuning.choices

    def one(name: str, block_size: int, dim: int, size: int, gpu: tuning.Gpu, cmt: bool) -> tuple[tuning.Tiles, ...]:
        return (chosen,) if name == kernel else choices(name, block_size, dim, size, gpu, cmt)

    return mock.patch.object(tuning, "choices", one)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same numbers every time; new memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def retrieved(dtype: torch.dtype, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Chunks that read the blocks they retrieve: the newest, which do not depend on rounding."""
    lengths = [2 * width + 1, width + 1, width + 1, 1, 1]
    leaves, _ = leaves_of(scale, (2, scale.heads, sum(lengths), dim), scale.group, dtype)
    for granularity, alpha in zip(GRANULARITIES, (0.0, 0.5, 1.0, 0.0), strict=True):

        def compute(by_kernels: bool, kind: torch.dtype, how=(granularity, alpha)) -> Sequence[Tensor]:
            backend = "triton" if by_kernels else "reference"
            memory = Memory(width - 1, k=2, select=Newest(how[0]), gate=Grouped(how[1]), backend=backend)
            return [in_chunks(memory, [x.to(kind) for x in leaves], lengths)]

        yield compared(f"{granularity}, α={alpha:g}", compute, dtype)


def in_chunks(memory: Any, leaves: Sequence[Tensor], lengths: Iterable[int], *scoring: Any) -> Tensor:
    """Outputs of one layer that reads chunks of these lengths."""
    outs, start = [], 0
    for length in lengths:
        outs.append(memory.attend(0, *(x[:, :, start : start + length] for x in leaves), *scoring))
        memory.commit()
        start += length
    return torch.cat(outs, 2)


def chunks(dtype: torch.dtype, dim: int, scale: Scale) -> Iterator[Line]:
    """Chunks of texts without landmarks: queries that choose other blocks, by a near tie, are few and do not count."""
    block, length, start = (32, 1000, 2000) if scale.is_gpu else (4, 19, 60)
    turned = partial(rotate_by, 1e4 ** -torch.linspace(0, 1, dim // 4, device=scale.device))
    end = -(-(start + length) // block) * block
    sizes = (2, scale.group, length, dim), (2, end, dim), (2, end, dim)
    q, keys, values = (scale.normal(*size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes))
    means = keys.float().unflatten(1, (-1, block)).mean(2)
    for tile, softcap, is_moved in ((block, None, False), (block, None, True), (block // 2, 30.0, False)):
        config = AttentionConfig(block, 2 * block, 8 if scale.is_gpu else 3, 1, tile, dim**-0.5, softcap)

        def read(by_kernels: bool, kind: torch.dtype, config=config, is_moved=is_moved) -> Sequence[Tensor]:
            from landmark.memory.blocks.prefill_kernels import read_tiles

            text = Text(keys.to(kind), values.to(kind), means.to(torch.promote_types(kind, torch.float32)))
            if is_moved:
                placed = rotated_summaries(text.summaries, 0, turned, config)
                factors = block_rope_factors(turned.args[0], 1 + text.summaries.shape[1], block)
                text = text._replace(rotation=turned, rotated=placed, factors=factors)
            reading = replace(config, tiles_by=read_tiles if by_kernels else None)
            out, lse, chosen = read_chosen(q.to(kind), text, start, reading)
            return out, lse, blocks_of_queries(chosen, start, q, reading).sort(-1).values

        found = {key: read(*key) for key in ((True, dtype), (False, dtype), (False, torch.float64))}
        exact = found[False, torch.float64][2]
        alike = {key: (x[2] == exact).all(-1)[:, None].expand(x[1].shape) for key, x in found.items()}
        agreed = torch.stack([*alike.values()]).all(0)
        what = f"tile={tile} softcap={softcap} moved={is_moved}"
        line = compared(what, lambda *key, a=agreed, f=found: [x[a] for x in f[key][:2]], dtype)
        share = float(agreed.float().mean())
        yield line | {"ok": line["ok"] and share > 1 - NEAR_TIES, "agreed": share}


def tokens(dtype: torch.dtype, dim: int, scale: Scale) -> Iterator[Line]:
    """Tokens of texts without landmarks, one by one: what they write, choose and read."""
    block, before, count = (32, 1900, 100) if scale.is_gpu else (4, 50, 10)
    leaves, _ = leaves_of(scale, (2, scale.heads, before + count, dim), scale.group, dtype)
    ties = 0.0 if dtype == torch.float32 else NEAR_TIES
    for mapping, softcap, first in (("true", None, 0), ("stingy", None, 1), ("auto", 30.0, 0)):
        settings = {"k": 8 if scale.is_gpu else 3, "window": 2 * block, "dense": 0, "first": first, "mapping": mapping}
        settings |= {"positions": before + count // 2, "frequencies": 1e4 ** -torch.linspace(0, 1, dim // 4)}

        def compute(by_kernels: bool, kind: torch.dtype, settings=settings, scoring=Scoring(dim**-0.5, softcap)):  # noqa: B008
            memory, parts = BlockCache(block, **settings), [x.to(kind) for x in leaves]
            with mock.patch("landmark.memory.blocks.cache.has_kernels", lambda q, _: by_kernels and q.shape[2] == 1):
                return [in_chunks(memory, parts, [before, *[1] * count], scoring, None)[:, :, before:]]

        yield compared(f"{mapping}, softcap={softcap}, first={first}", compute, dtype, ties)


def rotations(dtype: torch.dtype, scale: Scale) -> Iterator[Line]:
    """Of more programs than 65,535, which one axis of a grid alone can have, and the gradient."""
    dim, length = scale.dims[-1], 66 * ROWS - 5
    x, grad = (scale.normal(*((64, 16) if scale.is_gpu else (1, 1)), length, dim, seed=s, dtype=dtype) for s in (0, 1))
    factors = torch.view_as_real(rotary_factors(torch.arange(length, device=scale.device), dim, 1e4, dtype))

    def turn(x: Tensor, sign: int) -> Tensor:
        (even, odd), (cosine, sine) = x.unflatten(-1, (-1, 2)).unbind(-1), factors.to(x.dtype).unbind(-1)
        return torch.stack([even * cosine - odd * sine * sign, even * sine * sign + odd * cosine], -1).flatten(-2)

    def compute(by_kernels: bool, kind: torch.dtype) -> Sequence[Tensor]:
        if not by_kernels:
            return turn(x.to(kind), 1), turn(grad.to(kind), -1)
        out = rotation(leaf := x.clone().requires_grad_(), factors, False)
        return out.detach(), torch.autograd.grad(out, leaf, grad)[0]

    yield compared("turned, and the gradient", compute, dtype)


def best_landmarks(scale: Scale) -> Iterator[Line]:
    """The blocks of a sort by score and recency; most scores are tied, and a ring of rows has wrapped."""
    dim, generator = scale.dims[-1], torch.Generator(scale.device).manual_seed(0)
    made = partial(torch.randint, -1, 2, generator=generator, device=scale.device)
    for queries, heads, kv_heads, recent, k in ((1, 8, 8, 4, 4), (1, 8, 2, 5, 4), (9, 8, 2, 0, 16)):
        for capacity, added in ((5000, 5000), (4097, 12_298)) if scale.is_gpu else ((70, 70), (65, 202)):
            rotated = made((recent + 1, 2, queries, heads, dim)).float()
            landmarks = made((2, kv_heads, capacity, dim)).float()
            ours = top_k_landmarks(rotated, landmarks, added=added, recent=recent, k=k)
            ages = (added - 1 - torch.arange(capacity, device=scale.device)) % capacity + 1
            keys = landmarks.repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("bthd,bhnd->bhtn", rotated[-1], keys)
            for age in range(1, recent + 1):
                row = (added - age) % capacity
                scores[..., row] = torch.einsum("bthd,bhd->bht", rotated[age - 1], keys[:, :, row])
            order = (scores.double() * 2**32 - ages).topk(k, -1).indices
            what = f"T={queries} H={heads}/{kv_heads} k={k}, {capacity} rows, {added} added"
            yield same(what, [ours.sort(-1).values], [ages[order].sort(-1).values])


def loss_of_head(dtype: torch.dtype, scale: Scale) -> Iterator[Line]:
    """The loss of a large vocabulary, and its gradients."""
    rows, dim, words = (2000, 256, 50_304) if scale.is_gpu else (9, 8, 5000)
    hidden, weight = (scale.normal(*size, seed=s, dtype=dtype) for s, size in enumerate([(1, rows, dim), (words, dim)]))
    targets = torch.arange(rows, device=scale.device)[None] * 7 % words
    targets[0, ::5] = NO_LOSS

    def compute(by_kernels: bool, kind: torch.dtype) -> Sequence[Tensor]:
        h, w = (x.to(kind, copy=True).requires_grad_() for x in (hidden, weight))
        loss = head_loss(h, w, targets, None)[0] if by_kernels else summed_loss(h @ w.T, targets, None)[0]
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    yield compared("loss and gradients", compute, dtype)


def tiers(scale: Scale) -> Iterator[Line]:
    """The same numbers from every tier, where another stream than the default one computes."""
    width, dim = scale.widths[-1], scale.dims[-1]
    leaves, _ = leaves_of(scale, (1, scale.heads, 10 * width, dim), scale.group, scale.dtypes[0])

    def read(tier: str) -> Tensor:
        stream: Any = torch.cuda.stream(torch.cuda.Stream()) if scale.is_gpu else nullcontext()
        with tempfile.TemporaryDirectory() as folder:
            if scale.is_gpu:
                torch.cuda.synchronize()
            with stream:
                store = Store(None, tier, folder, cache=3)
                memory = Memory(width - 1, k=2, select=Best(), store=store, backend="triton")
                out = in_chunks(memory, leaves, [4 * width, 4 * width, 1, 1, 2 * width - 2])
            if scale.is_gpu:
                torch.cuda.synchronize()
        return out

    yield from (same(f"{tier} as device", [read(tier)], [read("device")]) for tier in TIERS[1:])


# ---- whole models


@dataclass(frozen=True)
class Size:
    """Widths of a model, the tokens of its windows, and their number in a batch."""

    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    length: int = 512
    batch: int = 32


SIZES = {
    **{"nano": Size(3, 8, 64, 2048), "small": Size(8, 4, 128, 2048, batch=64), "paper": Size(12, 8, 128, 4096)},
    "tiny": Size(1, 2, 8, 16, length=40, batch=2),
}
ROOM = 2_000  # tokens that are generated at most


def filled(model: Headless, context: int, backend: str, room: int = ROOM) -> Memory:
    """A memory of random blocks, behind which a block lacks two tokens: each head retrieves from everywhere.

    room: further tokens for which its tensors need not grow.
    """
    memory, like = model.new_memory(), model.embedding.weight
    assert isinstance(memory, Memory)
    memory.backend = backend
    blocks, width = context // BLOCK_SIZE, BLOCK_SIZE + 1
    memory.expect(blocks * BLOCK_SIZE + room)
    shape = 1, model.config.num_heads, blocks, width, model.config.head_dim
    generator = torch.Generator(like.device).manual_seed(0)
    for layer in range(model.config.num_layers):
        state = memory.layers[layer] = memory.new_layer()
        keys, values = (torch.randn(shape, device=like.device, generator=generator).to(like.dtype) for _ in range(2))
        state.store.reserve(blocks + room // BLOCK_SIZE, values[..., 1:, :])
        state.store.add(keys, values)
    memory.position = blocks * width
    with torch.no_grad():
        model(torch.zeros(1, BLOCK_SIZE - 2, dtype=torch.int64, device=like.device), memory=memory)
    return memory


def graph_of(model: Headless, memory: Memory) -> NextToken:
    assert model.config.landmark_id is not None
    return NextToken(model, memory, model.config.landmark_id)


def off_in_the_middle(what: str, pairs: Iterable[tuple[Tensor, Tensor]], captured: bool, sums: float = 1e-4) -> Line:
    """The median error of tokens, whose sums are in another order: near ties of blocks may change some."""
    errors = sorted(off(found, expected) for found, expected in pairs)
    middle = errors[len(errors) // 2]
    return {"what": what, "ok": captured and middle <= sums, "off": f"{middle:.2e}", "largest": f"{errors[-1]:.2e}"}


@torch.no_grad()
def graphs(context: int, scale: Scale) -> Iterator[Line]:
    """Tokens of a landmark model by CUDA graphs, over several blocks, against its equations in float64."""
    torch.manual_seed(0)
    ours = decoder(SIZES["nano" if scale.is_gpu else "tiny"], "landmark").to(scale.device)
    exact = copy.deepcopy(ours).double()
    ids = torch.randint(0, 256, (3 * BLOCK_SIZE + 4 if scale.is_gpu else 4, 1, 1), device=scale.device)
    for before, room in ((context, ROOM), (context, 0), (0, 0)) if scale.is_gpu else ((context, ROOM),):
        memory, reference = filled(ours, before, "triton", room), filled(exact, before, "reference", room)
        read_next = graph_of(ours, memory)
        pairs = [(read_next(token).clone(), exact(token, memory=reference)) for token in ids]
        what = f"a landmark model, {before:,} tokens before, room for {room:,}"
        yield off_in_the_middle(what, pairs, read_next.graphs.captures == scale.is_gpu)


def pretrained_model(scale: Scale, dtype: torch.dtype) -> Any:
    """Qwen 2.5 0.5B's shape with random weights, which reads through blocks; on a CPU a tiny one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from landmark.models.huggingface import LandmarkSettings, attach

    sizes = (896, 4864, 24, 14, 2, 151_936) if scale.is_gpu else (32, 48, 2, 4, 2, 99)
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    config = Qwen2Config(**dict(zip((*names, "vocab_size"), sizes, strict=True)), max_position_embeddings=1 << 18)
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.eval().to(scale.device, dtype)
    settings = BlockCacheSettings() if scale.is_gpu else BlockCacheSettings().updated({"k": 2, "window": 8})
    return attach(model, LandmarkSettings(None, 32 if scale.is_gpu else 4, 512, settings.updated({"dense": 0})))


def keys_of(model: Any, context: int, scale: Scale) -> Iterator[tuple[Tensor, Tensor]]:
    """Random keys and values (1, H_kv, context, d) of each layer."""
    config, dtype = model.config, model.lm_head.weight.dtype
    shape = 1, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        yield scale.normal(*shape, seed=2 * layer, dtype=dtype), scale.normal(*shape, seed=2 * layer + 1, dtype=dtype)


def blocks_of_text(model: Any, context: int, scale: Scale) -> Any:
    """A memory of a text of random keys and values."""
    cache, room = model.new_memory(), context + ROOM
    cache.expect(room)
    for layer, (keys, values) in enumerate(keys_of(model, context, scale)):
        state = cache.memory.layers[layer] = cache.memory.new_layer(layer, keys)
        state.write(0, keys[0], values[0], room, 0)
    cache.ids = torch.zeros(1, context, dtype=torch.int64, device=model.device)
    cache.memory.position = context
    return cache


@torch.no_grad()
def pretrained_graph(context: int, scale: Scale) -> Iterator[Line]:
    """Tokens of a pretrained model by one CUDA graph, in float32, against the operators of a CPU in float64."""
    ours, exact = (pretrained_model(scale, dtype) for dtype in (torch.float32, torch.float64))
    exact.load_state_dict(ours.state_dict())
    memory, reference = (blocks_of_text(model, context, scale) for model in (ours, exact))
    reference.memory.observer = lambda retrieval: None  # which kernels do not tell
    pairs = []
    for token in torch.randint(0, 99, (40, 1, 1), device=scale.device):
        found = ours(token, past_key_values=memory).logits.clone()
        pairs.append((found, exact(token, past_key_values=reference).logits))
    captured = memory.next_token is not None and memory.next_token.graphs.captures
    yield off_in_the_middle(f"a pretrained model, {context:,} tokens before", pairs, captured == scale.is_gpu)
