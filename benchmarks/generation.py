"""The time of a generated token as the memory grows, on each tier. Beside other models: benchmarks/wrapped.py."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.report import Report, Row, Target
from benchmarks.settings import BLOCK_SIZE, Headless, Options, Say, decoder
from benchmarks.timing import Spread, interleave, ratios
from landmark.memory import Memory

TIERS = ("device", "disk")
TOTAL, NO_SCAN = "a token", "the same, less its scan"
TARGET = Target("≤", 1.2)
BLOCKS_AT_ONCE = 1000  # added together while a memory is filled


@dataclass(frozen=True)
class Scale:
    """The widths of `size=nano`. contexts: in tokens. tokens: generated in each round."""

    contexts: tuple[int, ...] = (4_000, 16_000, 64_000, 256_000, 1_000_000)
    num_layers: int = 4
    num_heads: int = 4
    head_dim: int = 32
    mlp_dim: int = 512
    k: int = 4
    tokens: int = 20
    rounds: int = 15


def scale(quick: bool) -> Scale:
    return Scale((500, 1000, 2000), 2, 2, 8, 32, tokens=3, rounds=3) if quick else Scale()


def run(options: Options, say: Say) -> Report:
    size = scale(options.quick)
    model = decoder(size, "landmark")
    rows: list[Row] = []
    for tier in TIERS:
        functions: dict[tuple[str, int], Callable[[], None]] = {}
        scans: dict[tuple[str, int], list[float]] = defaultdict(list)
        for context in size.contexts:
            say(f"filling {context:,} tokens, tier {tier}")
            functions[tier, context] = generating(model, filled(model, size, context, tier), size, scans[tier, context])
        say(f"tokens after each, tier {tier}")
        seconds = interleave(functions, rounds=size.rounds)
        for what in (TOTAL, NO_SCAN):
            each = {
                context: [
                    (total - (scan if what == NO_SCAN else 0.0)) / size.tokens
                    for total, scan in zip(seconds[tier, context], scans[tier, context][-size.rounds :], strict=True)
                ]
                for context in size.contexts
            }
            rows += compared(tier, what, each)
    return Report(rows)


def compared(tier: str, what: str, each: dict[int, list[float]]) -> list[Row]:
    """A row for each context, compared with the first."""
    first, last = min(each), max(each)
    return [
        Row(
            part="generation",
            setting=f"after {context:,} tokens, tier {tier}",
            context=context,
            measured=what,
            against=f"itself at {first:,}",
            unit="ms",
            value=Spread.of([1e3 * value for value in values]),
            ratio=ratios(values, each[first]),
            target=TARGET if context == last and what == NO_SCAN else None,
        )
        for context, values in each.items()
    ]


def filled(model: Headless, size: Scale, context: int, tier: str) -> Memory:
    """A memory full of random landmarks, so that the heads retrieve different blocks from everywhere in it."""
    blocks, width = context // BLOCK_SIZE, BLOCK_SIZE + 1
    memory = model.new_memory(max_blocks=blocks, k=size.k, tier=tier)
    assert isinstance(memory, Memory)
    keys, values = torch.randn(2, 1, size.num_heads, min(blocks, BLOCKS_AT_ONCE), width, size.head_dim)
    for layer in range(size.num_layers):
        memory.layers[layer] = memory.new_layer()
        for start in range(0, blocks, BLOCKS_AT_ONCE):
            count = min(BLOCKS_AT_ONCE, blocks - start)
            keys[..., -1, :] = torch.randn(1, size.num_heads, len(keys[0, 0]), size.head_dim)
            memory.layers[layer].store.add(keys[:, :, :count], values[:, :, :count])
    memory.position = blocks * width
    return memory


def generating(model: Headless, memory: Memory, size: Scale, scans: list[float]) -> Callable[[], None]:
    """A function that feeds random tokens one by one, as generation does, and records the seconds of the scans."""

    @torch.no_grad()
    def generate() -> None:
        before = memory.stats["seconds_searching"]
        for token in torch.randint(0, 256, (size.tokens, 1, 1)):
            model(token, memory=memory, last=True)
        scans.append(memory.stats["seconds_searching"] - before)

    return generate
