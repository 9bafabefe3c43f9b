"""Timings of whole models: a token after a long memory, and a training step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.checks import line
from benchmarks.gpu.journal import Line
from benchmarks.gpu.shapes import Scale
from benchmarks.gpu.timing import Times, lines, timed
from benchmarks.report import Target
from benchmarks.settings import BLOCK_SIZE, GPT2Vocabulary, decoder
from landmark.memory import Memory, UnlimitedMemory
from landmark.models import Decoder, DecoderConfig
from landmark.models.config import Landmarks
from landmark.utils.window_batch import WindowBatch

OURS, DENSE, FLOOR = "landmark, k = 4", "plain transformer, all keys", "moving the bytes it must read"
ROOM = 2_000  # tokens that are generated at most
FASTER = {4_000: 1.0, 128_000: 0.2}  # most of the plain transformer's time, by tokens before
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


def filled(model: Decoder, size: Size, context: int, backend: str, like: Tensor) -> Memory:
    """A memory of random blocks: unlike in a text, each head retrieves different blocks from everywhere."""
    memory = model.new_memory()
    assert isinstance(memory, Memory)
    memory.backend = backend
    blocks, width = context // BLOCK_SIZE, BLOCK_SIZE + 1
    memory.expect(blocks + ROOM // BLOCK_SIZE)
    shape = 1, size.num_heads, blocks, width, size.head_dim
    for layer in range(size.num_layers):
        state = memory.layers[layer] = memory.new_layer()
        keys, values = (torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        state.store.reserve(blocks + ROOM // BLOCK_SIZE, values[..., 1:, :])
        state.store.add(keys, values)
    memory.position = blocks * width
    return memory


def decoding(size: Size, contexts: tuple[int, ...], scale: Scale) -> Iterator[Line]:
    """A token after a memory of random blocks, beside a plain transformer and the time of moving what it must read."""
    model, plain = (decoder(size, kind).to(scale.device, scale.half) for kind in ("landmark", "transformer"))
    like, token = model.embedding.weight, torch.zeros(1, 1, dtype=torch.int64, device=scale.device)
    large = torch.empty(1 << (30 if scale.is_gpu else 16), dtype=torch.int8, device=scale.device)
    moved = timed({FLOOR: lambda: large.clone()}, scale)[FLOOR]
    yield line("a token waits for nothing", partial(_without_waiting, model, size, contexts[0], scale))
    ours: dict[str, Times] = {}
    for context in contexts:
        memory = filled(model, size, context, "triton", like)
        dense = Filled(size, context, like)
        with torch.no_grad():
            times = timed({OURS: partial(model, token, memory), DENSE: partial(plain, token, dense)}, scale)
        bandwidth, ours[f"{context:,} tokens"] = 2 * large.numel() / min(moved.device), times[OURS]
        floor = bytes_of_token(model, size, context) / bandwidth
        times[FLOOR] = Times([floor] * len(times[OURS].device), [0.0] * len(times[OURS].device))
        target = {OURS: Target("≤", FASTER[context])} if context in FASTER else None
        yield from lines(f"a token after {context:,} tokens", times, DENSE, target)
        del memory, dense
    first, *_, last = ours
    rounds = min(len(each.device) for each in ours.values())
    ours = {name: Times(each.device[:rounds], each.host[:rounds]) for name, each in ours.items()}
    yield from lines("a token", ours, first, {last: FLAT})


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
