"""The time of a generated token as the memory grows, on each tier, and beside models that attend to everything."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaModel

from benchmarks.growth import TimedRetrieve
from benchmarks.report import Report, Row, Target, compare, milliseconds
from benchmarks.settings import BLOCK_SIZE, VOCABULARY, Headless, Options, Say, decoder
from benchmarks.timing import Spread, interleave, ratios
from landmark.memory import Memory
from landmark.memory import memory as memory_module
from landmark.utils.constants import DEFAULT_CHUNK

TIERS = ("device", "disk")
TOTAL, NO_SCAN = "a token", "the same, less its scan"
TARGET = Target("≤", 1.2)
OURS, DENSE, LLAMA = "landmarks", "plain transformer, all keys", "Llama of transformers, DynamicCache"
BESIDE = {2_000: {LLAMA: Target("≤", 1.2)}, 16_000: {DENSE: Target("≤", 0.6)}}  # of their time, by tokens before
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
    for context in contexts_beside(options.quick):
        say(f"beside others, after {context:,} tokens")
        rows += beside(model, size, context)
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


def contexts_beside(quick: bool) -> tuple[int, ...]:
    """Tokens before those that are generated beside other models."""
    return (500,) if quick else tuple(BESIDE)


@torch.no_grad()
def beside(model: Headless, size: Scale, context: int) -> list[Row]:
    """Tokens that landmarks, a plain transformer and one of transformers generate in turn, hidden states alone."""
    ids = torch.randint(0, 256, (1, context))
    memory, everything = model.new_memory(k=size.k), decoder(size, "transformer")
    kept, cache, llama = everything.unlimited_memory(context + 10_000), DynamicCache(), llama_of(size)
    for part in ids.split(DEFAULT_CHUNK, 1):
        model(part, memory=memory)
        everything(part, memory=kept)
        llama(part, past_key_values=cache, use_cache=True)
    functions = {
        OURS: fed(size, lambda token: model(token, memory=memory, last=True)),
        DENSE: fed(size, lambda token: everything(token, memory=kept, last=True)),
        LLAMA: fed(size, lambda token: llama(token, past_key_values=cache, use_cache=True)),
    }
    seconds = interleave(functions, rounds=size.rounds)
    taken = milliseconds({name: [each / size.tokens for each in values] for name, values in seconds.items()})
    setting, targets = f"after {context:,} tokens", BESIDE.get(context, {})
    return [
        row
        for other in (DENSE, LLAMA)
        for row in compare(
            "generation",
            setting,
            "ms",
            {name: taken[name] for name in (OURS, other)},
            other,
            {OURS: targets[other]} if other in targets else None,
        )
    ]


def llama_of(size: Scale) -> nn.Module:
    """A Llama with random weights and the same widths; its perceptron has three matrices."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.num_heads * size.head_dim,
        intermediate_size=size.mlp_dim * 2 // 3,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        head_dim=size.head_dim,
        max_position_embeddings=1 << 17,
    )
    return LlamaModel(config).eval()


def fed(size: Scale, step: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    """A function that feeds random tokens one by one."""

    @torch.no_grad()
    def feed() -> None:
        for token in torch.randint(0, 256, (size.tokens, 1, 1)):
            step(token)

    return feed


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
        scan = TimedRetrieve()
        with mock.patch.object(memory_module, "retrieve", scan):
            for token in torch.randint(0, 256, (size.tokens, 1, 1)):
                model(token, memory=memory, last=True)
        scans.append(scan.seconds)

    return generate
