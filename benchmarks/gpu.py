"""The fused kernels against published ones on a GPU, in under ten minutes: `python -m benchmarks.gpu`."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import report
from benchmarks.exactness import Inexact, check_float32
from benchmarks.report import Report, Row, Target
from benchmarks.settings import BLOCK_SIZE, decoder
from benchmarks.timing import Spread, interleave, ratios
from landmark.attention import ContextMiss, Layout, Packed, Window, landmark_attention
from landmark.attention.fused.tuning import is_interpreted
from landmark.memory import Memory, UnlimitedMemory
from landmark.memory.select import Newest
from landmark.memory.settings import GRANULARITIES

if TYPE_CHECKING:
    from benchmarks.growth import Scale as Growth

RESULTS = Path(__file__).parent / "results"
OURS, PAIR = "landmark, triton", "landmark, triton, deterministic"
FLASH, CUDNN, FLEX, BLOCKWISE = "flash SDPA", "cuDNN SDPA", "FlexAttention", "blockwise"
DECODED, DENSE, FLOOR = "landmark, k = 4", "plain transformer, all keys", "moving the bytes it must read"
FASTER = {4_000: 1.0, 128_000: 0.2}  # most of the plain transformer's time, by tokens before
ROOM = 10_000  # tokens that are generated at most
PASSES = ("forward", "backward", "both")
WORK = {"forward": 2, "backward": 5, "both": 7}  # matrix products of flash attention, half of each masked
TARGETS = {64: Target("≤", 1.15), 51: Target("≤", 1.3)}  # of forward and backward together from T=4096 up, by W

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Case = tuple[slice, slice, Layout, ContextMiss | None]  # samples and queries of it, and what they attend to
Say = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """What is measured.

    tokens: B·T. width: H·d. widths: W. groups: query heads for each key head. slow: the T at which FlexAttention, whose
    bias has T·T/W numbers a head, and blockwise attention are measured.
    """

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    dims: tuple[int, ...] = (64, 128)
    widths: tuple[int, ...] = (64, 51)
    groups: tuple[int, ...] = (1, 4)
    tokens: int = 65536
    width: int = 2048
    slow: int = 4096
    rounds: int = 5
    at_least: float = 0.01  # seconds of a round
    sizes: tuple[str, ...] = ("small", "paper")
    memories: tuple[int, ...] = (4_000, 32_000, 128_000, 256_000, 1_000_000)


QUICK = Scale(
    device="cpu",
    dtype=torch.float32,
    lengths=(24,),
    dims=(16,),
    widths=(8,),
    groups=(2,),
    tokens=48,
    width=32,
    slow=0,
    rounds=1,
    at_least=0.0,
    sizes=(),
    memories=(100, 200),
)


@dataclass(frozen=True)
class Shape:
    length: int
    dim: int
    block: int  # W
    group: int
    scale: Scale

    def __str__(self) -> str:
        heads = "MHA" if self.group == 1 else f"{self.group}:1 GQA"
        return f"d={self.dim}, W={self.block}, {heads}, T={self.length}"

    @property
    def heads(self) -> int:
        return max(self.group, self.scale.width // self.dim)

    @property
    def batch(self) -> int:
        return max(1, self.scale.tokens // self.length)

    def inputs(self) -> tuple[list[Tensor], Tensor]:
        """q, k, v and the gradient of the output."""
        made = partial(torch.randn, device=self.scale.device, dtype=self.scale.dtype)
        kv_heads = self.heads // self.group
        q, grad = (made(self.batch, self.heads, self.length, self.dim) for _ in range(2))
        k, v = (made(self.batch, kv_heads, self.length, self.dim) for _ in range(2))
        return [x.requires_grad_() for x in (q, k, v)], grad

    def operations(self, what: str) -> float:
        """FLOPs of plain causal attention; the additional operations of landmark attention do not count."""
        return WORK[what] * self.batch * self.heads * self.length**2 * self.dim


def landmark(shape: Shape, backend: str) -> Attention:
    phase = torch.arange(shape.batch) * 7 % shape.block  # a different phase for each sample
    phase = phase.to(shape.scale.device if backend == "triton" else "cpu")  # where the backend reads it
    return lambda q, k, v: landmark_attention(q, k, v, Window(shape.block - 1, phase), backend=backend)[0]


def causal(backend: SDPBackend | None, group: int) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)

    return attend


def flex(shape: Shape, q: Tensor) -> Attention:
    """Landmark attention as an ordinary softmax, with a bias s_landmark − L_b on the scores of earlier blocks.

    The bias is given: computing it and its gradient are not timed. Every tile of the mask holds a landmark that is
    masked, so the mask is applied in all tiles.
    """
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block, length = shape.block, shape.length
    with torch.no_grad():
        bias = torch.randn(shape.batch, shape.heads, length, -(-length // block), device=q.device, dtype=q.dtype)

    def score(scores, batch, head, query, key):
        own = query // block == key // block
        return torch.where(own, scores, scores + bias[batch, head, query, key // block])

    def visible(batch, head, query, key):
        return (key <= query) & (key % block != block - 1)

    mask = create_block_mask(visible, None, None, length, length, device=shape.scale.device)
    torch._dynamo.reset()  # else it stops compiling after a few shapes
    functorch_config.donated_buffer = False  # the backward pass is run several times
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask, enable_gqa=shape.group > 1)


def kernels(scale: Scale, say: Say) -> Iterator[Row]:
    for dim in scale.dims:
        for block in scale.widths:
            say(f"d={dim}, W={block}: tiles are chosen")
            shape = Shape(scale.slow or max(scale.lengths), dim, block, 1, scale)
            inputs, grad = shape.inputs()
            torch.autograd.grad(landmark(shape, "triton")(*inputs), inputs, grad)
            say(f"d={dim}, W={block}: exactness")
            check(Shape(min(scale.lengths) + 3, dim, block, scale.groups[-1], scale))
            for group in scale.groups:
                for length in scale.lengths:
                    shape = Shape(length, dim, block, group, scale)
                    say(str(shape))
                    yield from measure(shape, say)


def check(shape: Shape) -> None:
    """Raise Inexact unless outputs and gradients equal, to rounding, those of the equations in float64.

    The cases are windows with any phase, a context miss token, a prefix, packed documents, and retrieved blocks.
    """
    (q, k, v), grad = shape.inputs()
    q, k, v, grad = (x[:2].detach() for x in (q, k, v, grad))
    device, dtype, length, width = q.device, shape.scale.dtype, shape.length, shape.block
    controlled = torch.arange(length // width + 2, device=device) % 3 > 0
    cmt = ContextMiss(k[0, :, 0], controlled.expand(len(q), -1))
    phases = torch.tensor([0, width - 1], device=device)
    window = Window(width - 1, phases[: len(q)])
    packed = Packed(width - 1, phases[[0, 1, 1]], torch.tensor([0, 5, 5, length], device=device))
    cases: dict[str, Case] = {
        "windows": (slice(None), slice(None), window, None),
        "a context miss token": (slice(None), slice(None), window, cmt),
        "one query": (slice(None), slice(-1, None), Window(width - 1, prefix=length - 1), None),
        "packed documents": (slice(1), slice(None), packed, None),
    }
    for name, case in cases.items():

        def run(backend: str, kind: torch.dtype, case: Case = case) -> list[Tensor]:
            samples, queries, layout, extra = case
            leaves = [x[samples].to(kind).requires_grad_() for x in (q[:, :, queries], k, v)]
            extra = extra and replace(extra, key=extra.key.to(kind))
            out, _ = landmark_attention(leaves[0], leaves[1], leaves[2], layout, extra=extra, backend=backend)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad[samples, :, queries].to(kind))]

        exact, plain = run("reference", torch.float64), run("reference", dtype)
        check_float32(f"{shape}, {name}", run("triton", dtype), plain, exact)
    for granularity in GRANULARITIES:
        read = partial(retrieved, shape, granularity)
        exact, plain, ours = read("reference", torch.float64), read("reference", dtype), read("triton", dtype)
        check_float32(f"{shape}, {granularity}", [ours], [plain], [exact])


def retrieved(shape: Shape, granularity: str, backend: str, dtype: torch.dtype) -> Tensor:
    """A chunk's attention to the blocks that it retrieves: the newest, which do not depend on rounding."""
    generator = torch.Generator(shape.scale.device).manual_seed(0)
    memory = Memory(shape.block - 1, k=2, select=Newest(granularity), backend=backend)
    size = 2, shape.heads, 6 * shape.block + 5, shape.dim
    made = [torch.randn(size, generator=generator, device=shape.scale.device) for _ in range(3)]
    q, k, v = (x.to(shape.scale.dtype).to(dtype) for x in made)
    outs = []
    for part in torch.arange(size[2]).split(2 * shape.block + 1):
        chunk = slice(int(part[0]), int(part[-1]) + 1)
        outs.append(memory.attend(1, q[:, :, chunk], k[:, :, chunk], v[:, :, chunk]))
        memory.commit()
    return torch.cat(outs, 2)


def measure(shape: Shape, say: Say) -> Iterator[Row]:
    inputs, grad = shape.inputs()
    is_gpu = shape.scale.device == "cuda"
    attends = {
        FLASH: causal(SDPBackend.FLASH_ATTENTION if is_gpu else None, shape.group),
        OURS: landmark(shape, "triton"),
        PAIR: landmark(shape, "triton"),
    }
    if is_gpu:
        attends[CUDNN] = causal(SDPBackend.CUDNN_ATTENTION, shape.group)
    if shape.length == shape.scale.slow and shape.group == 1:
        attends[FLEX] = flex(shape, inputs[0])
        if shape.dim == max(shape.scale.dims) and shape.block == shape.scale.widths[0]:
            attends[BLOCKWISE] = landmark(shape, "blockwise")  # thousands of launches, a second for each step
    steps = {}
    for name, attend in attends.items():
        try:
            step = passes(attend, inputs, grad)
            if name == PAIR:
                step = {what: partial(deterministic, run) for what, run in step.items()}
            for run in step.values():
                run()
        except RuntimeError as error:  # a kernel that is missing here, or out of memory
            if name in (OURS, PAIR, FLASH):
                raise
            say(f"{name} is left out: {str(error).splitlines()[0]}")
        else:
            steps[name] = step
    for what in PASSES:
        functions = {name: step[what] for name, step in steps.items()}
        seconds = timed(functions, shape.scale)
        target = TARGETS.get(shape.block) if what == "both" and shape.length >= 4096 else None
        for name, each in seconds.items():
            yield Row(
                part="kernels",
                setting=f"{shape}, {what}",
                measured=name,
                against=FLASH,
                unit="TFLOP/s",
                value=Spread.of([shape.operations(what) / second / 1e12 for second in each]),
                ratio=ratios(each, seconds[FLASH]),
                target=target if name == OURS else None,
            )


def passes(attend: Attention, inputs: Sequence[Tensor], grad: Tensor) -> dict[str, Callable[[], object]]:
    out = attend(*inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True),
        "both": lambda: torch.autograd.grad(attend(*inputs), inputs, grad),
    }


def deterministic(run: Callable[[], object]) -> None:
    """Run with the kernels that give the same numbers every time, without filling new memory with NaN."""
    of_memory: Any = torch.utils.deterministic
    fills, of_memory.fill_uninitialized_memory = of_memory.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        run()
    finally:
        torch.use_deterministic_algorithms(False)
        of_memory.fill_uninitialized_memory = fills


def timed(functions: Mapping[str, Callable[[], object]], scale: Scale) -> dict[str, list[float]]:
    """Seconds of a call in each round: the mean over enough calls to take `at_least` seconds."""

    def clock() -> float:
        if scale.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    repeats = {}
    for name, function in functions.items():
        started = clock()
        function()
        repeats[name] = 1 + int(scale.at_least / max(clock() - started, 1e-6))

    def repeated(name: str) -> None:
        for _ in range(repeats[name]):
            functions[name]()

    seconds = interleave({name: partial(repeated, name) for name in functions}, rounds=scale.rounds, clock=clock)
    return {name: [each / repeats[name] for each in values] for name, values in seconds.items()}


def training(scale: Scale, say: Say) -> Iterator[Row]:
    """Forward, backward and AdamW on a batch, in the precision of the recipe."""
    for size in scale.sizes:
        from benchmarks.training import LANDMARK, MODELS, PLAIN, configuration, training_step

        say(f"{size}: training step")
        batch = f"train.batch_size={32 if size == 'paper' else 64}"
        configs = {name: configuration(size, [*MODELS[name], batch], quick=False) for name in (PLAIN, LANDMARK)}
        steps = {name: training_step(config, scale.device) for name, config in configs.items()}
        seconds = timed(steps, scale)
        setting = f"{size}, {configs[PLAIN].train.batch_size} × {configs[PLAIN].train.length}"
        taken = report.milliseconds(seconds)
        yield from report.compare("training", setting, "ms", taken, PLAIN, {LANDMARK: Target("≤", 1.1)})


class Filled(UnlimitedMemory):
    """Random keys and values of a whole text."""

    def __init__(self, size: "Growth", context: int, like: Tensor):
        super().__init__(context + ROOM)
        shape = 1, size.num_heads, self.cache, size.head_dim
        for layer in range(size.num_layers):
            keys, values = (torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(2))
            self._cached[layer] = keys, values
        self._read = context


def decoding(scale: Scale, say: Say) -> Iterator[Row]:
    """The time of a token after a memory of random blocks: 3 layers, each reads its retrieved blocks in one launch.

    Beside it a plain transformer that attends to all keys, and the time of moving what a token must read.
    """
    from benchmarks.growth import Scale as Growth
    from benchmarks.growth import filled_at_random

    size = Growth()
    model, plain = (decoder(size, kind).to(scale.device, scale.dtype) for kind in ("landmark", "transformer"))
    like, token = model.embedding.weight, torch.zeros(1, 1, dtype=torch.int64, device=scale.device)
    bandwidth, ours = copied_per_second(scale), {}
    for context in scale.memories:
        say(f"a token after {context:,} tokens")
        with torch.device(scale.device):
            memory = filled_at_random(model, size, context, scale.dtype)
        step = torch.no_grad()(partial(model, token, memory=memory))
        functions = {DECODED: step, DENSE: torch.no_grad()(partial(plain, token, memory=Filled(size, context, like)))}
        seconds = timed(functions, scale)
        ours[f"{context:,} tokens"] = seconds[DECODED]
        seconds[FLOOR] = [bytes_of_token(model, size, context) / bandwidth] * scale.rounds
        target = {DECODED: Target("≤", FASTER[context])} if context in FASTER else None
        taken = report.milliseconds(seconds)
        yield from report.compare("decoding", f"after {context:,} tokens", "ms", taken, DENSE, target)
    first, *_, last = ours
    yield from report.compare("decoding", "a token", "ms", report.milliseconds(ours), first, {last: Target("≤", 2.0)})


def copied_per_second(scale: Scale) -> float:
    """Bytes that a copy of a large tensor reads and writes in a second."""
    large = torch.empty(1 << (30 if scale.device == "cuda" else 20), dtype=torch.int8, device=scale.device)
    seconds = timed({FLOOR: partial(torch.clone, large)}, scale)[FLOOR]
    return 2 * large.numel() / min(seconds)


def bytes_of_token(model: torch.nn.Module, size: "Growth", context: int) -> int:
    """Bytes that a token must read: weights, the landmarks of all blocks in float32, and the blocks it retrieves."""
    weights = sum(x.nbytes for x in model.parameters())
    width = size.num_layers * size.num_heads * size.head_dim
    itemsize = next(model.parameters()).itemsize
    return weights + width * (context // BLOCK_SIZE * 4 + 2 * size.k * BLOCK_SIZE * itemsize)


PARTS = {"kernels": kernels, "training": training, "decoding": decoding}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,…", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, interpreted on the CPU, as a check")
    arguments = parser.parse_args(words)
    chosen = arguments.only.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    scale, started = QUICK if arguments.quick else Scale(), time.time()
    if scale.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU: run this on a machine with a GPU, or with --quick", file=sys.stderr)
        return 1
    if scale.device == "cpu" and not is_interpreted():
        print("error: --quick interprets the kernels: set TRITON_INTERPRET=1", file=sys.stderr)
        return 1
    torch.manual_seed(0)

    def say(text: str) -> None:
        print(f"{time.time() - started:6.0f} s  {text}", flush=True)

    command = shlex.join(["python", "-m", "benchmarks.gpu", *words])
    rows: list[Row] = []
    try:
        for part in chosen:
            for row in PARTS[part](scale, say):
                rows.append(row)
    except Inexact as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:  # rows measured before a failure are written
        whole = chosen == list(PARTS) and {row.part for row in rows} == set(PARTS)
        name = "-".join([report.gpu_stem(), *([] if whole else chosen)])
        if rows:
            written = report.write(Report(rows), arguments.out, name, command)
            print(f"\n{report.as_text(Report(rows))}\nwritten: {', '.join(map(str, written))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
