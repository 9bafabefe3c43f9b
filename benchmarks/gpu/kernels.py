"""Timings of the attention of training windows beside published kernels, of FlexAttention, and of retrieved blocks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu.checks import about, against_exact, forced, line
from benchmarks.gpu.journal import Line
from benchmarks.gpu.shapes import Attention, Scale, Shape, causal, deterministic, flex, landmark
from benchmarks.gpu.timing import lines, timed
from benchmarks.gpu.work import summary
from benchmarks.report import Target
from landmark.attention import Scoring, Window, landmark_attention
from landmark.attention.fused import tuning
from landmark.attention.plain import attention_forward, merged
from landmark.memory.blocks.cache import BlockCache
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.reading_kernels import attend_to_retrieved_blocks

OURS, PAIR = "landmark", "landmark, deterministic"
FLASH, CUDNN, FLEX = "flash SDPA", "cuDNN SDPA", "FlexAttention"
GATHER = "attn-gym's gather_attn"
PASSES = {"forward": 2, "backward": 5, "both": 7}  # matrix products of flash attention
TARGETS = {64: Target("≤", 1.15), 51: Target("≤", 1.3)}  # of forward and backward together from T=4096 up, by W
LAST = 128  # queries whose numbers are checked before all are timed


def beside_flash(length: int, dim: int, width: int, group: int, scale: Scale) -> Iterator[Line]:
    """Windows with tiles that the tuner chooses, whose last queries and keys are checked first."""
    shape = Shape.timed(scale, length, dim, width, group)
    inputs, grad = shape.inputs(scale, scale.half)
    flash = SDPBackend.FLASH_ATTENTION if scale.is_gpu else None
    attends = {FLASH: causal(flash, group), OURS: landmark(shape, scale.device)}
    if scale.is_gpu:
        attends[CUDNN] = causal(SDPBackend.CUDNN_ATTENTION, group)
    exact = line("the last queries and keys", lambda: _last(shape, inputs, grad))
    yield {**exact, "tiles": chosen_tiles(shape, scale)}
    if not exact["ok"]:  # nothing inexact is timed
        return
    yield from _compared(shape, attends, inputs, grad, scale, with_pair=True)


def flex_attention(length: int, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    shape = Shape.timed(scale, length, dim, width)
    inputs, grad = shape.inputs(scale, scale.half)
    attends = {OURS: landmark(shape, scale.device), FLEX: flex(shape, inputs[0])}
    yield from _compared(shape, attends, inputs, grad, scale, against=OURS)


def tiles(length: int, dim: int, width: int, scale: Scale) -> Iterator[Line]:
    """Every choice of the tuner for each kernel, forced; the other kernels have their defaults."""
    shape = Shape.timed(scale, length, dim, width)
    inputs, grad = shape.inputs(scale, scale.half)
    attend, gpu = landmark(shape, scale.device), tuning.gpu_of(torch.device(scale.device))
    for kernel in tuning.KERNELS:
        steps, tried = {}, tuning.choices(kernel, width - 1, dim, scale.half.itemsize, gpu, False)
        for chosen in tried:
            run = _passes(attend, inputs, grad)["forward" if kernel == "forward" else "backward"]
            run = _deterministic(run) if kernel in tuning.PAIR else run
            steps[about(chosen)] = partial(_with_tiles, kernel, chosen, run)
        if steps:
            yield from lines(f"{shape}, {kernel}", timed(steps, scale), about(tried[0]))


def _with_tiles(kernel: str, chosen: tuning.Tiles, run: Callable[[], object]) -> object:
    with forced(kernel, chosen):
        return run()


def _compared(
    shape: Shape,
    attends: dict[str, Attention],
    inputs: Sequence[Tensor],
    grad: Tensor,
    scale: Scale,
    against: str = FLASH,
    with_pair: bool = False,
) -> Iterator[Line]:
    steps = {name: _passes(attend, inputs, grad) for name, attend in attends.items()}
    if with_pair:
        steps[PAIR] = {what: _deterministic(run) for what, run in _passes(attends[OURS], inputs, grad).items()}
    for name in [name for name in steps if name not in (OURS, against)]:
        try:
            for run in steps[name].values():
                run()
        except RuntimeError as error:  # a kernel that is missing here, or out of memory
            del steps[name]
            yield {"kind": "note", "setting": str(shape), "measured": name, "left_out": summary(error)}
    for what, products in PASSES.items():
        times = timed({name: step[what] for name, step in steps.items()}, scale)
        target = TARGETS.get(shape.width) if what == "both" and shape.length >= 4096 and against == FLASH else None
        targets = None if target is None else {OURS: target}
        for found in lines(f"{shape}, {what}", times, against, targets):
            yield {**found, "tflops": round(shape.operations(products) / found["device_ms"][0] / 1e9, 2)}


def _passes(attend: Attention, inputs: Sequence[Tensor], grad: Tensor) -> dict[str, Callable[[], object]]:
    out: list[Tensor] = []

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    def backward() -> object:
        if not out:
            out.append(attend(*inputs))
        return torch.autograd.grad(out[0], inputs, grad, retain_graph=True)

    return {
        "forward": forward,
        "backward": backward,
        "both": lambda: torch.autograd.grad(attend(*inputs), inputs, grad),
    }


def _deterministic(run: Callable[[], object]) -> Callable[[], object]:
    def done() -> object:
        with deterministic():
            return run()

    return done


def _last(shape: Shape, inputs: Sequence[Tensor], grad: Tensor) -> Line:
    """What the last queries get, and the gradients of the last keys, which no earlier query sees, for one key head."""
    count = min(LAST, shape.length)
    out = landmark(shape, inputs[0].device.type)(*inputs)
    ours = [out, *torch.autograd.grad(out, inputs, grad)]
    end, window = slice(shape.length - count, None), Window(shape.width - 1, shape.phase[:1], shape.length - count)

    def expected(backend: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.detach()[:1, : shape.group if x is inputs[0] else 1].to(dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q[:, :, end], k, v)]
        attended, _ = landmark_attention(leaves[0], leaves[1], leaves[2], window, backend=backend)
        dq, dk, dv = torch.autograd.grad(attended, leaves, grad[:1, : shape.group, end].to(dtype))
        return [attended.detach(), dq, dk[:, :, end], dv[:, :, end]]

    heads = shape.group, shape.group, 1, 1
    mine = [x.detach()[:1, :n, end] for x, n in zip(ours, heads, strict=True)]
    plain, exact = expected("reference", inputs[0].dtype), expected("reference", torch.float64)
    return against_exact(mine, plain, exact, ("out", "dq", "dk", "dv"))


def chosen_tiles(shape: Shape, scale: Scale) -> dict[str, str]:
    """The tiles that the tuner has chosen, by kernel."""
    gpu, found = tuning.gpu_of(torch.device(scale.device)), {}
    for kernel in ("forward", "backward"):
        tried = tuning.choices(kernel, shape.width - 1, shape.dim, scale.half.itemsize, gpu, False)
        best = getattr(tuning.tuned(kernel, tried), "best_config", None)
        found[kernel] = "default" if best is None else str(best)
    return found


class Retrieval:
    """Queries that read k blocks of a store, shared by all heads, each query its own.

    queries: T. blocks: of the store. block_size: ℓ.
    """

    def __init__(self, scale: Scale, heads: int, queries: int, blocks: int, block_size: int, k: int):
        dim, made = scale.dims[-1], torch.Generator(scale.device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=made, device=scale.device).to(scale.half)

        self.q, self.local = normal(1, heads, queries, dim), normal(1, heads, queries, dim)
        self.keys, self.values = (normal(heads * blocks, block_size, dim) for _ in range(2))
        self.landmarks = normal(1, heads, blocks, dim).float()
        order = torch.rand(1, 1, queries, blocks, generator=made, device=scale.device).argsort(-1)
        self.ages = 1 + order[..., :k].sort(-1, descending=True).values
        self.rotated = self.q.permute(0, 2, 1, 3)[None].contiguous() * dim**-0.5
        self.blocks = blocks

    def read(self) -> Tensor:
        tensors = self.rotated, self.keys, self.values, self.landmarks, self.ages
        lse = self.local[..., 0].float()
        return attend_to_retrieved_blocks(*tensors, added=self.blocks, recent=0, local=(self.local, lse))

    def gathered(self, gather_attn: Callable[..., Tensor]) -> Callable[[], Tensor]:
        """attn-gym's function of the same blocks, as tokens; keys are values too, so it reads half the bytes."""
        offsets = torch.arange(self.keys.shape[1], device=self.q.device)
        places = (self.blocks - self.ages[0, 0])[..., None] * len(offsets) + offsets
        pool = self.keys.view(1, self.q.shape[1], -1, self.q.shape[3])
        return lambda: gather_attn(self.q, self.local, pool, places.flatten(1)[None].int(), sliding_window_size=1)


def retrieved_blocks(
    queries: int, blocks: int, block_size: int, k: int, scale: Scale, with_gather: bool = False
) -> Iterator[Line]:
    """A chunk that reads the blocks it retrieves; beside attn-gym, whose many choices take a minute to compile."""
    heads = max(1, scale.width // scale.dims[-1])
    reading = Retrieval(scale, heads, queries, blocks, block_size, k)
    functions: dict[str, Callable[[], object]] = {OURS: reading.read}
    setting = f"{queries} queries of {heads} heads, {k} of {blocks} blocks of {block_size}"
    if with_gather:
        try:
            from attn_gym.sparse import gather_attn  # pyright: ignore[reportMissingImports]

            functions[GATHER] = reading.gathered(gather_attn)
            functions[GATHER]()
        except Exception as error:  # not installed, or not for this GPU
            yield {"kind": "note", "setting": setting, "measured": GATHER, "left_out": summary(error)}
            return
    yield from lines(setting, timed(functions, scale), GATHER if with_gather else OURS)


def chunks(lengths: Sequence[int], scale: Scale) -> Iterator[Line]:
    """A chunk of a text without landmarks, as a layer of a pretrained model reads it, beside attention to all keys."""
    heads, kv_heads, dim, count = (14, 2, 64, 2048) if scale.is_gpu else (2, 1, 16, 8)
    settings = BlockCacheSettings().updated({"dense": 0} if scale.is_gpu else {"dense": 0, "k": 2, "window": 8})
    frequencies = torch.ones(dim // 2, device=scale.device)
    made = partial(torch.randn, generator=torch.Generator(scale.device).manual_seed(0), device=scale.device)
    for length in lengths:
        q, k, v = (made(1, h, length, dim).to(scale.half) for h in (heads, kv_heads, kv_heads))
        chunk = [x[:, :, -count:] for x in (q, k, v)]
        functions: dict[str, Callable[[], object]] = {}
        for name, prefill in ((OURS, True), ("landmark, each query alone", False)):
            positions = {"frequencies": frequencies, "positions": length}
            memory = BlockCache(32 if scale.is_gpu else 4, **vars(settings), **positions)
            memory.expect(length)
            for start in range(0, length - count, count):
                part = slice(start, min(start + count, length - count))
                memory.attend(0, q[:, :, part], k[:, :, part], v[:, :, part], Scoring(), None)
                memory.commit()
            memory.begin(prefill)
            functions[name] = partial(_attend_once, memory, chunk)
        copies = [x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
        functions[FLASH] = partial(_attend_to_all, chunk[0], *copies)
        yield from lines(f"a chunk of {count} tokens behind {length - count:,}", timed(functions, scale), FLASH)


@torch.no_grad()
def _attend_once(memory: BlockCache, chunk: Sequence[Tensor]) -> Tensor:
    q, k, v = chunk
    out = memory.attend(0, q, k, v, Scoring(), None)
    memory.discard()
    return out


@torch.no_grad()
def _attend_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a chunk to all keys, those before it and its own. k, v: (B, H, before + T, d)."""
    parts = []
    for is_own, own in ((False, slice(None, -q.shape[2])), (True, slice(-q.shape[2], None))):
        parts.append(attention_forward(q, k[:, :, own], v[:, :, own], causal=is_own, scale=q.shape[-1] ** -0.5))
    return merged(*parts)[0]
