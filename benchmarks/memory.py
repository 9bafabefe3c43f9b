"""Speed and peak memory of an evaluation with memory, against a plain transformer with short windows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.report import Report, Row, Target, compare, megabytes, per_second
from benchmarks.settings import BLOCK_SIZE, GPT2Vocabulary, Headless, Options, Say
from benchmarks.timing import interleave, peak_of_new_process
from landmark.experiment.evaluation.measurement import segment_losses
from landmark.models import Decoder, DecoderConfig
from landmark.models.config import Landmarks, Recurrence
from landmark.utils.constants import DEFAULT_CHUNK

PLAIN, XL = "plain transformer", "Transformer-XL"
MEMORY = {f"landmark, {kind}": kind for kind in ("per_token_and_head", "per_head", "per_token")}
NAMES = (PLAIN, *MEMORY, XL)
SPEED = {
    "landmark, per_token_and_head": Target("≥", 0.6),
    "landmark, per_head": Target("≥", 0.8),
    "landmark, per_token": Target("≥", 0.8),
    XL: Target("≥", 0.9),
}
PEAK = {"landmark, per_token_and_head": Target("≤", 1.5)}
LOSSES, HIDDEN = "losses", "hidden states alone"


@dataclass(frozen=True)
class Scale:
    """The models. Tokens fed at a time: `window` to the plain one, `chunk` to the landmark one, `xl_window` to XL."""

    num_layers: int = 6
    num_heads: int = 8
    head_dim: int = 64
    mlp_dim: int = 2048
    vocab_size: int = GPT2Vocabulary.vocab_size
    batch: int = 4
    length: int = 2048
    window: int = 512
    chunk: int = DEFAULT_CHUNK
    xl_window: int = 256
    cache: int = 256
    k: int = 4
    blocks: int = 40

    def __str__(self) -> str:
        return f"{self.batch} × {self.length} tokens"


def scale(quick: bool) -> Scale:
    if not quick:
        return Scale()
    return Scale(1, 2, 8, 32, 320, batch=2, length=320, window=160, chunk=100, xl_window=80, cache=80, blocks=6)


def run(options: Options, say: Say) -> Report:
    rows: list[Row] = []
    size = scale(options.quick)
    measured = NAMES[:2] if options.quick else NAMES
    for what in (HIDDEN, LOSSES):
        say(what)
        readers = {name: reader(name, what, size) for name in NAMES}
        seconds = interleave(readers, rounds=3, warmup=0)
        setting = f"{size}, {what}"
        speed, peak = (SPEED, PEAK) if what == LOSSES else ({}, {})
        rows += compare("memory", setting, "tokens/s", per_second(size.batch * size.length, seconds), PLAIN, speed)
        if options.quick and what == HIDDEN:  # its peaks are measured as those of losses are
            continue
        say(f"{what}: peak memory, each in a new process")
        peaks = {name: peak_of_new_process("memory", f"{what}: {name}", options.quick) for name in measured}
        rows += compare("memory", f"{setting}, peak", "MB", megabytes(peaks), PLAIN, peak)
    return Report(rows)


def run_once(name: str, quick: bool) -> None:
    what, _, competitor = name.partition(": ")
    reader(competitor, what, scale(quick))()


def reader(name: str, what: str, size: Scale) -> Callable[[], None]:
    """A function that reads the whole text with random weights, as an evaluation does."""
    config = configuration(name, size)
    model = (Decoder(config) if what == LOSSES else Headless(config)).eval()
    tokens = torch.randint(0, size.vocab_size - 64, (size.batch, size.length + 1))

    @torch.no_grad()
    def read() -> None:
        for segment, local, memory in feed(name, model, tokens, size):
            if what == LOSSES:
                segment_losses(model, segment, local, memory)
            else:
                read_chunks(model, segment[:, :-1], local, memory)

    return read


def feed(name: str, model: Decoder, tokens: Tensor, size: Scale) -> Iterator[tuple]:
    """Yields segments (B, L+1), the number of tokens fed at a time, and the memory."""
    if name == PLAIN:
        for start in range(0, size.length, size.window):
            yield tokens[:, start : start + size.window + 1], size.window, None
    elif name == XL:
        yield tokens, size.xl_window, new_memory(name, model, size)
    else:
        yield tokens, size.chunk, new_memory(name, model, size)


def new_memory(name: str, model: Decoder, size: Scale):
    settings = {"max_blocks": size.blocks, "k": size.k, "granularity": MEMORY[name]} if name in MEMORY else {}
    return model.new_memory(**settings)


def read_chunks(model: Decoder, tokens: Tensor, local: int, memory) -> Tensor:
    """The model's outputs for tokens (B, T) fed `local` at a time."""
    return torch.cat([model(chunk, memory=memory) for chunk in tokens.split(local, 1)], 1)


def configuration(name: str, size: Scale) -> DecoderConfig:
    landmarks = Landmarks(size.vocab_size - 44, BLOCK_SIZE) if name in MEMORY else None
    recurrence = Recurrence(size.xl_window, size.cache) if name == XL else None
    shape = size.vocab_size, size.num_layers, size.num_heads, size.head_dim, size.mlp_dim
    return DecoderConfig(*shape, landmarks=landmarks, recurrence=recurrence)
