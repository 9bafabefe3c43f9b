"""The time of a chunk, and the memory kept, as the context grows."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.report import Report, Row, Target
from benchmarks.settings import BLOCK_SIZE, Headless, Options, Say, decoder
from benchmarks.timing import Spread, interleave, ratios
from landmark.attention.plain import causal_attention
from landmark.attention.rotary import RotaryTable, rotate
from landmark.experiment.data.stdlib import StandardLibrary
from landmark.memory import Memory
from landmark.memory.landmarks.select import Best, Newest, Selector
from landmark.utils.constants import DEFAULT_CHUNK

LANDMARK = "landmark, per_token_and_head"
NO_SCAN = "the same, less its scan"
PER_HEAD = "landmark, per_head"
RECENT = "the last k blocks, no scan"
SCATTERED = "every query its own blocks"
PLAIN = "plain attention to everything"
BLOCKS, PREFIX = "landmark's blocks", "all keys and values"
NAMES = (LANDMARK, NO_SCAN, PER_HEAD, RECENT, SCATTERED, PLAIN, BLOCKS, PREFIX)
# What chooses blocks, and whether the memory is full of text (else of random blocks).
READINGS = {
    LANDMARK: (Best(), True),
    PER_HEAD: (Best("per_head"), True),
    RECENT: (Newest(), True),
    SCATTERED: (Best(), False),
}
TIME, KEPT = "chunk", "kept"
TARGETS = {LANDMARK: Target("≤", 2.0), NO_SCAN: Target("≤", 1.15), RECENT: Target("≤", 1.15)}
BLOCKS_AT_ONCE = 20  # added together while a memory is filled

ByContext = Mapping[tuple[str, int], Sequence[float]]


@dataclass(frozen=True)
class Scale:
    """contexts: in tokens. plain_context: largest context at which plain attention is measured."""

    contexts: tuple[int, ...] = (2_000, 8_000, 32_000, 128_000, 256_000)
    plain_context: int = 32_000
    num_layers: int = 3
    num_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 2048
    chunk: int = DEFAULT_CHUNK
    k: int = 4
    rounds: int = 11

    def __str__(self) -> str:
        layers = f"{self.num_layers} layers, {self.num_heads} heads of {self.head_dim}"
        return f"a chunk of {self.chunk} tokens, {layers}, k={self.k}"


def scale(quick: bool) -> Scale:
    return Scale((500, 1000, 2000), 1000, 2, 2, 8, 32, 100, rounds=3) if quick else Scale()


class PrefixCache:
    """Rotated keys, and values, of a whole prefix in each layer, with room for one more chunk."""

    def __init__(self, size: Scale, context: int):
        shape = 2, size.num_layers, 1, size.num_heads, context + size.chunk, size.head_dim
        self.context = context
        self.keys, self.values = torch.randn(shape)
        self._rotary = RotaryTable()

    @property
    def bytes_kept(self) -> int:
        return 2 * self.keys[..., : self.context, :].nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        factors = self._rotary(self.context, q.shape[2], q)
        keys[:, :, self.context :] = rotate(k, factors)
        values[:, :, self.context :] = v
        return causal_attention(rotate(q, factors), keys, values, prefix=self.context)

    def commit(self) -> None:
        """Keep nothing: each chunk is measured after the same prefix."""


def run(options: Options, say: Say) -> Report:
    size = scale(options.quick)
    landmark, plain = decoder(size, "landmark"), decoder(size, "transformer")
    functions: dict[tuple[str, int], Callable[[], None]] = {}
    scans: dict[tuple[str, int], list[float]] = defaultdict(list)
    kept: dict[tuple[str, int], list[float]] = {}
    for context in size.contexts:
        say(f"filling memories of {context:,} tokens")
        memories = {True: filled_with_text(landmark, size, context), False: filled_at_random(landmark, size, context)}
        for name, (select, of_text) in READINGS.items():
            chunks = iter(text(context)[context:].split(size.chunk))
            functions[name, context] = reading(landmark, memories[of_text], chunks, select, scans[name, context])
        kept[BLOCKS, context] = [memories[True].stats["bytes_kept"]]
    chunk = text(0)[None, : size.chunk]
    for context in (each for each in size.contexts if each <= size.plain_context):
        cache = PrefixCache(size, context)
        functions[PLAIN, context] = attending(plain, cache, chunk)
        kept[PREFIX, context] = [cache.bytes_kept]
    say("a chunk after each context")
    seconds: dict[tuple[str, int], list[float]] = interleave(functions, rounds=size.rounds)
    for context in size.contexts:
        total, scan = seconds[LANDMARK, context], scans[LANDMARK, context][-size.rounds :]
        seconds[NO_SCAN, context] = [a - b for a, b in zip(total, scan, strict=True)]
    return Report([*rows(size, TIME, seconds, "ms", 1e3), *rows(size, KEPT, kept, "MB", 1e-6)])


def rows(size: Scale, what: str, values: ByContext, unit: str, factor: float) -> list[Row]:
    """A row for each competitor and context, compared with its first context. Targets are for the last context.

    size: what was measured. what: TIME or KEPT. values: by competitor and context, one for each round. unit: of the
    rows. factor: from the values to this unit.
    """
    first, last = size.contexts[0], size.contexts[-1]
    return [
        Row(
            part="growth",
            setting=f"{what} after {context:,} tokens",
            context=context,
            measured=name,
            against=f"itself at {first:,}",
            unit=unit,
            value=Spread.of([factor * value for value in each]),
            ratio=ratios(each, values[name, first]),
            target=TARGETS.get(name) if what == TIME and context == last else None,
        )
        for name in NAMES
        for (competitor, context), each in values.items()
        if competitor == name
    ]


def text(context: int) -> Tensor:
    """Source code as bytes, enough for the context and for the chunks that are measured after it."""
    length, parts = context + 100_000, []
    for document in StandardLibrary().documents("train"):
        parts.append(document.text.encode())
        if sum(map(len, parts)) >= length:
            break
    return torch.tensor(list(b"".join(parts)[:length]))


def filled_with_text(model: Headless, size: Scale, context: int) -> Memory:
    """A memory that a text has filled: each further chunk replaces the oldest blocks, so the context keeps its length.

    Nothing is retrieved while it is filled, because that takes long and changes little.
    """
    memory = model.new_memory(max_blocks=context // BLOCK_SIZE, k=0)
    assert isinstance(memory, Memory)
    with torch.no_grad():
        for tokens in text(context)[:context].split(BLOCKS_AT_ONCE * BLOCK_SIZE):
            model(tokens[None], memory=memory)
    memory.k = size.k
    return memory


def filled_at_random(model: Headless, size: Scale, context: int, dtype: torch.dtype | None = None) -> Memory:
    """A memory full of random blocks: unlike in a text, each query retrieves different blocks."""
    blocks, width = context // BLOCK_SIZE, BLOCK_SIZE + 1
    memory = model.new_memory(max_blocks=blocks, k=0)
    assert isinstance(memory, Memory)
    while memory.position < blocks * width:
        shape = 3, 1, size.num_heads, BLOCKS_AT_ONCE * width, size.head_dim
        for layer in range(size.num_layers):
            q, k, v = torch.randn(shape, dtype=dtype)
            memory.attend(layer, q, k, v)
        memory.commit()
    memory.k = size.k
    return memory


def reading(
    model: Headless, memory: Memory, chunks: Iterator[Tensor], select: Selector, scans: list[float]
) -> Callable[[], None]:
    """A function that reads the next chunk with blocks that `select` chooses, and records the seconds of its scan."""

    @torch.no_grad()
    def read() -> None:
        memory.select, before = select, memory.stats["seconds_searching"]
        model(next(chunks)[None], memory=memory)
        scans.append(memory.stats["seconds_searching"] - before)

    return read


def attending(model: Headless, cache: PrefixCache, chunk: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def read() -> None:
        model(chunk, memory=cache)  # pyright: ignore[reportArgumentType]

    return read
