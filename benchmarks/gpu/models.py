"""Timings of whole models: a token after a long memory, and a training step."""

import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.checks import ROUNDING, line, off
from benchmarks.gpu.journal import Line
from benchmarks.gpu.shapes import Scale
from benchmarks.gpu.timing import Times, lines, timed
from benchmarks.gpu.work import summary
from benchmarks.report import Target
from benchmarks.settings import BLOCK_SIZE, GPT2Vocabulary, Headless, decoder
from landmark.memory import Memory, UnlimitedMemory
from landmark.memory.landmarks.step import NextToken
from landmark.models import Decoder, DecoderConfig
from landmark.models.config import Landmarks
from landmark.utils.window_batch import WindowBatch

OURS, DENSE, FLOOR = "landmark, k = 4", "plain transformer, all keys", "moving the bytes it must read"
GRAPH = f"{OURS}, as a graph"
ROOM = 2_000  # tokens that are generated at most
FASTER = {4_000: 1.0, 128_000: 0.2}  # most of the plain transformer's time, by tokens before
SUMS = 1e-5  # error in float32 of sums in another order
FLAT = Target("≤", 2.0)  # the time after most tokens by that after fewest
PLAIN, LANDMARK = "plain transformer", "landmark"


@dataclass(frozen=True)
class Size:
    """Widths of a model, the tokens of its windows, and their number in a batch."""

    num_layers: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    length: int = 512
    batch: int = 32


DECODED = Size(3, 8, 64, 2048)
TRAINED = {"small": Size(8, 4, 128, 2048, batch=64), "paper": Size(12, 8, 128, 4096)}
TINY = Size(1, 2, 8, 16, length=40, batch=2)


class Filled(UnlimitedMemory):
    """Random keys and values of a whole text."""

    def __init__(self, size: Size, context: int, like: Tensor):
        super().__init__(context + ROOM)
        shape = 1, size.num_heads, self.cache, size.head_dim
        for layer in range(size.num_layers):
            self._cached[layer] = (
                torch.randn(shape, dtype=like.dtype, device=like.device),
                torch.randn_like(torch.empty(shape, dtype=like.dtype, device=like.device)),
            )
        self._read = context


def filled(model: Decoder, size: Size, context: int, backend: str, like: Tensor, room: int = ROOM) -> Memory:
    """A memory of random blocks: unlike in a text, each head retrieves different blocks from everywhere.

    room: further tokens for which its tensors need not grow.
    """
    memory = model.new_memory()
    assert isinstance(memory, Memory)
    memory.backend = backend
    blocks, width = context // BLOCK_SIZE, BLOCK_SIZE + 1
    memory.expect((blocks * BLOCK_SIZE) + room)
    shape = 1, size.num_heads, blocks, width, size.head_dim
    generator = torch.Generator(like.device).manual_seed(0)
    for layer in range(size.num_layers):
        state = memory.layers[layer] = memory.new_layer()
        keys, values = (torch.randn(shape, device=like.device, generator=generator).to(like.dtype) for _ in range(2))
        state.store.reserve(blocks + room // BLOCK_SIZE, values[..., 1:, :])
        state.store.add(keys, values)
    memory.position = blocks * width
    return memory


def decoding(size: Size, contexts: tuple[int, ...], about: str, scale: Scale) -> Iterator[Line]:
    """A token after a memory of random blocks, beside a plain transformer and the time of moving what it must read.

    about: begins the settings, as "paper: ".
    """
    model, plain = (decoder(size, kind).to(scale.device, scale.half) for kind in ("landmark", "transformer"))
    like, token = model.embedding.weight, torch.zeros(1, 1, dtype=torch.int64, device=scale.device)
    large = torch.empty(1 << (30 if scale.is_gpu else 16), dtype=torch.int8, device=scale.device)
    moved = timed({FLOOR: lambda: large.clone()}, scale)[FLOOR]
    yield line("a token waits for nothing", partial(_without_waiting, model, size, contexts[0], scale))
    ours: dict[str, Times] = {}
    for context in contexts:
        memory, read_next = filled(model, size, context, "triton", like), _near_the_end(model, size, context, scale)
        captured = _located(partial(_read_blocks, read_next, token, scale))
        yield {"kind": "check", "what": f"captured after {context:,} tokens", **captured}
        dense = Filled(size, context, like)
        competitors = {OURS: partial(model, token, memory), DENSE: partial(plain, token, dense)}
        best = GRAPH if captured["ok"] else OURS
        if captured["ok"]:
            competitors[GRAPH] = partial(read_next, token)
        with torch.no_grad():
            times = timed(competitors, scale)
        bandwidth, ours[f"{context:,} tokens"] = 2 * large.numel() / min(moved.device), times[best]
        floor = bytes_of_token(model, size, context) / bandwidth
        times[FLOOR] = Times([floor] * len(times[OURS].device), [0.0] * len(times[OURS].device))
        target = {best: Target("≤", FASTER[context])} if context in FASTER else None
        yield from lines(f"{about}a token after {context:,} tokens", times, DENSE, target)
        del memory, read_next, dense, competitors
    first, *_, last = ours
    rounds = min(len(each.device) for each in ours.values())
    ours = {name: Times(each.device[:rounds], each.host[:rounds]) for name, each in ours.items()}
    yield from lines(f"{about}a token", ours, first, {last: FLAT})


def _near_the_end(model: Headless, size: Size, context: int, scale: Scale, room: int = ROOM) -> NextToken:
    """Reads tokens with a filled memory whose pending block is complete after two of them. room: as of `filled`."""
    memory = filled(model, size, context, "triton", model.embedding.weight, room)
    with torch.no_grad():
        model(torch.zeros(1, BLOCK_SIZE - 2, dtype=torch.int64, device=scale.device), memory=memory)
    assert model.config.landmark_id is not None
    return NextToken(model, memory, model.config.landmark_id)


def _read_blocks(read_next: NextToken, token: Tensor, scale: Scale) -> Line:
    """Read until three blocks are complete, so that all is captured; on a CPU, until one is."""
    for _ in range(2 * BLOCK_SIZE + 5 if scale.is_gpu else 3):
        read_next(token)
    if scale.is_gpu:
        torch.cuda.synchronize()
    return {"ok": True}


def _located(check: Callable[[], Line]) -> Line:
    """The line of a check, or its first error and the calls that led to it: those of a failed capture follow it."""
    try:
        return check()
    except Exception as error:
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        calls = traceback.extract_tb(first.__traceback__)[-6:]
        at = " > ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls)
        return {"ok": False, "error": summary(first), "then": summary(error), "at": at}


def graphs(size: Size, context: int, scale: Scale) -> Iterator[Line]:
    """Final hidden states of tokens that CUDA graphs read, against those of the ordinary path, over several blocks.

    In float32 also from the beginning of a text, and where tensors grow; both make new graphs. In the type that is
    timed the ordinary path is off too, and chooses other blocks.
    """
    cases = [("tensors that grow", torch.float32, context, 0), ("", scale.half, context, ROOM)]
    if scale.is_gpu:
        cases.append(("a new text", torch.float32, 0, 0))
    for about, dtype, before, room in cases:
        named = ", ".join(filter(None, ["tokens as graphs", str(dtype).removeprefix("torch."), about]))
        check = partial(_as_ordinary, size, before, room, dtype, scale)
        yield {"kind": "check", "what": named, **_located(check)}


@torch.no_grad()
def _as_ordinary(size: Size, context: int, room: int, dtype: torch.dtype, scale: Scale) -> Line:
    """How far tokens by graphs are off the ordinary path in float32, beside the ordinary path in this type."""
    torch.manual_seed(0)
    exact = decoder(size, "landmark").to(scale.device)
    model = copy.deepcopy(exact).to(dtype)
    blocks = (3 if context else 9) if scale.is_gpu else 0
    tokens = torch.randint(0, 256, (blocks * BLOCK_SIZE + 4, 1, 1), device=scale.device)
    start = torch.zeros(1, BLOCK_SIZE - 2, dtype=torch.int64, device=scale.device)
    memory, reference = (filled(each, size, context, "triton", each.embedding.weight, room) for each in (model, exact))
    for each, of_model in ((model, memory), (exact, reference)):
        each(start, memory=of_model)
    read_next = _near_the_end(model, size, context, scale, room)
    of_graphs, ordinary, largest = [], [], 0.0
    for token in tokens:
        ours, plain = read_next(token).clone(), model(token, memory=memory)
        expected = exact(token, memory=reference).double()
        of_graphs.append(off(ours, expected))
        ordinary.append(off(plain, expected))
        largest = max(largest, off(ours, plain.double()))
    middle, of_plain = (sorted(each)[len(each) // 2] for each in (of_graphs, ordinary))
    allowed = 2 * of_plain + (SUMS if dtype == torch.float32 else ROUNDING * torch.finfo(dtype).eps)
    found = {"off": f"{middle:.2e}", "ordinary": f"{of_plain:.2e}", "largest": f"{largest:.2e}"}
    within = middle <= allowed and (dtype != torch.float32 or largest <= 1e-3)
    return {"ok": within, **found, "allowed": f"{allowed:.2e}", "tokens": len(tokens)}


def _without_waiting(model: Decoder, size: Size, context: int, scale: Scale) -> Line:
    """Whether a token is launched without a wait for the device; on a CPU there is none."""
    memory = filled(model, size, context, "triton", model.embedding.weight)
    token = torch.zeros(1, 1, dtype=torch.int64, device=scale.device)
    with torch.no_grad():
        for number in range(3):
            if scale.is_gpu and number == 2:  # compiled and allocated by now
                torch.cuda.set_sync_debug_mode("error")
            try:
                model(token, memory)
            finally:
                if scale.is_gpu:
                    torch.cuda.set_sync_debug_mode("default")
    return {"ok": True}


def bytes_of_token(model: Decoder, size: Size, context: int) -> int:
    """Bytes that a token must read: weights, the landmarks of all blocks in float32, and the blocks it retrieves."""
    weights = sum(x.nbytes for x in model.parameters())
    width, itemsize = size.num_layers * size.num_heads * size.head_dim, next(model.parameters()).itemsize
    return weights + width * (context // BLOCK_SIZE * 4 + 2 * 4 * BLOCK_SIZE * itemsize)


def training(size: Size, name: str, scale: Scale) -> Iterator[Line]:
    """Forward, backward and AdamW on a batch of random tokens, in bfloat16 autocast on a GPU."""
    steps = {kind: _step(size, kind, scale) for kind in (PLAIN, LANDMARK)}
    setting = f"a training step of {name}, {size.batch} × {size.length} tokens"
    yield from lines(setting, timed(steps, scale), PLAIN, {LANDMARK: Target("≤", 1.1)})


def _step(size: Size, kind: str, scale: Scale) -> Callable[[], object]:
    words = GPT2Vocabulary()
    widths = size.num_layers, size.num_heads, size.head_dim, size.mlp_dim
    backend = "auto" if scale.is_gpu else "triton"
    landmarks = Landmarks(words.landmark, BLOCK_SIZE) if kind == LANDMARK else None
    config = DecoderConfig(words.vocab_size, *widths, landmarks=landmarks, backend=backend)
    model = Decoder(config).to(scale.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(words.eot, (size.batch, size.length + 1))
    phase = torch.arange(size.batch) * 7 % (BLOCK_SIZE + 1)
    if kind == LANDMARK:
        closes = (phase[:, None] + torch.arange(size.length + 1)) % (BLOCK_SIZE + 1) == BLOCK_SIZE
        tokens = torch.where(closes, words.landmark, tokens)
    tokens = tokens.to(scale.device)
    batch = WindowBatch(tokens[:, :-1], tokens[:, 1:], phase if kind == LANDMARK else None)

    def step() -> None:
        with torch.autocast(scale.device, torch.bfloat16, enabled=scale.is_gpu):
            for loss, targets in model.window_losses(batch):
                (loss / targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
