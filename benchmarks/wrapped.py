"""A model of transformers with landmarks beside the same model with its own cache: `python -m benchmarks.wrapped`."""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks import report
from benchmarks.report import Report, Row, Target, compare, megabytes, per_second
from benchmarks.settings import Say, progress, use_threads
from benchmarks.timing import interleave, peak_of_new_process
from landmark.memory.landmarks.settings import MemorySettings
from landmark.models.huggingface import LandmarkSettings, attach

RESULTS = Path(__file__).parent / "results"
PLAIN, OURS = "plain, DynamicCache", "with landmarks"
PREFILL = {16_384: Target("≥", 1.5)}  # by tokens read
DECODE = {4_096: Target("≥", 0.95), 16_384: Target("≥", 2.0)}
BOUND = {OURS: Target("≤", 1.0)}  # of the memory


@dataclass(frozen=True)
class Scale:
    """The widths of SmolLM2 135M, with fewer layers and a vocabulary that is smaller in proportion.

    lengths: tokens of the prompt, and the rounds in which it is read. tokens: generated in each round, of `decoding`.
    """

    lengths: tuple[tuple[int, int], ...] = ((4_096, 7), (16_384, 3), (65_536, 1))
    layers: int = 6
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    mlp_dim: int = 1536
    vocab_size: int = 9830
    block_size: int = 63
    local: int = 250
    k: int = 4
    tokens: int = 16
    decoding: int = 9

    def __str__(self) -> str:
        width = self.heads * self.head_dim
        return f"{self.layers} layers of {width}, {self.heads} heads, {self.kv_heads} of keys, MLP {self.mlp_dim}"


def scale(quick: bool) -> Scale:
    return Scale(((96, 2), (192, 2)), 2, 4, 2, 8, 32, 65, 7, 20, 2, 2, 3) if quick else Scale()


def run(size: Scale, quick: bool, clock: Callable[[], float], say: Say) -> Iterator[Row]:
    """The rows, one after the other.

    Args:
        size: what is measured.
        quick: whether the processes whose peak is measured use tiny shapes.
        clock: returns seconds.
        say: shows the progress.
    """
    models = {name: make(name, size) for name in (PLAIN, OURS)}
    for length, rounds in size.lengths:
        ids = torch.randint(0, size.vocab_size - 1, (1, length))
        caches: dict[str, Any] = {}
        say(f"prompts of {length:,} tokens")
        readers = {name: reader(model, ids, caches, name) for name, model in models.items()}
        seconds = interleave(readers, rounds=rounds, warmup=int(length == size.lengths[0][0]), clock=clock)
        target = {OURS: PREFILL[length]} if length in PREFILL else None
        yield from compare("prefill", f"{length:,} tokens", "tokens/s", per_second(length, seconds), PLAIN, target)
        kept = {PLAIN: bytes_of(caches[PLAIN]), OURS: bytes_kept(caches[OURS])}
        yield from compare("memory", f"keys and values of {length:,} tokens", "MB", megabytes(kept), PLAIN, BOUND)
        say(f"tokens after {length:,}")
        writers = {name: writer(model, ids, caches[name], size.tokens) for name, model in models.items()}
        seconds = interleave(writers, rounds=size.decoding, clock=clock)
        target = {OURS: DECODE[length]} if length in DECODE else None
        setting = f"after {length:,} tokens"
        yield from compare("decode", setting, "tokens/s", per_second(size.tokens, seconds), PLAIN, target)
    for length, _ in size.lengths[: 1 if quick else 2]:
        say(f"peak memory of {length:,} tokens, each in a new process")
        peaks = {name: peak_of_new_process("wrapped", f"{length} {name}", quick) for name in models}
        setting = f"peak of a process, {length:,} tokens"
        yield from compare("memory", setting, "MB", megabytes(peaks), PLAIN, BOUND)


def run_once(name: str, quick: bool) -> None:
    """Read a prompt and generate a few tokens. name: tokens of the prompt, and the competitor."""
    length, _, competitor = name.partition(" ")
    size, caches = scale(quick), {}
    model, ids = make(competitor, size), torch.randint(0, size.vocab_size - 1, (1, int(length)))
    reader(model, ids, caches, competitor)()
    writer(model, ids, caches[competitor], size.tokens)()


def make(name: str, size: Scale) -> Any:
    """The model with random weights, the same for both competitors."""
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.heads * size.head_dim,
        intermediate_size=size.mlp_dim,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    settings = LandmarkSettings(size.vocab_size - 1, size.block_size, size.local, MemorySettings(k=size.k))
    return model if name == PLAIN else attach(model, settings)


def reader(model: Any, ids: Tensor, caches: dict[str, Any], name: str) -> Any:
    """A function that reads a prompt into a new cache, which it leaves in `caches`."""

    @torch.inference_mode()
    def read() -> None:
        caches[name] = None  # the one of the round before
        caches[name] = DynamicCache(config=model.config) if name == PLAIN else model.new_memory()
        model(ids, past_key_values=caches[name], use_cache=True, logits_to_keep=1)

    return read


def writer(model: Any, ids: Tensor, cache: Any, count: int) -> Any:
    """A function that reads `count` tokens one by one, as `generate` does."""

    @torch.inference_mode()
    def write() -> None:
        for token in ids[:, :count].split(1, 1):
            model(token, past_key_values=cache, use_cache=True)

    return write


def bytes_of(cache: DynamicCache) -> int:
    kept = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(x.nbytes for x in kept if x is not None)


def bytes_kept(cache: Any) -> int:
    pending = [x for layer in cache.memory.layers.values() for x in getattr(layer, "pending", None) or ()]
    return cache.stats["bytes_kept"] + sum(x.nbytes for x in pending)


def main(words: Sequence[str]) -> int:
    """Measure, print the table, and write it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wrapped", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few runs, to check that everything works")
    parser.add_argument("--longest", type=int, metavar="TOKENS", help="leave longer prompts out")
    parser.add_argument("--processor-time", action="store_true", help="for a busy machine, with OMP_NUM_THREADS=1")
    parser.add_argument("--note", metavar="TEXT", help="written below the table, as what else the machine did")
    arguments = parser.parse_args(words)
    say = progress(time.time())
    use_threads()
    size = scale(arguments.quick)
    if arguments.longest is not None:
        size = replace(size, lengths=tuple(each for each in size.lengths if each[0] <= arguments.longest))
        if not size.lengths:
            parser.error(f"--longest {arguments.longest}: no prompt is as short")
    notes = [
        f"Llama with random weights, {size}; random tokens, a batch of one, float32; blocks of {size.block_size}, "
        f"k = {size.k}, {size.local} tokens read at a time; transformers {transformers.__version__}."
    ]
    notes += ["Seconds of the processor, not of the clock."] if arguments.processor_time else []
    notes += [arguments.note] if arguments.note else []
    clock = time.process_time if arguments.processor_time else time.perf_counter
    measured = Report(list(run(size, arguments.quick, clock, say)), notes)
    command = shlex.join(["python", "-m", "benchmarks.wrapped", *words])
    written = report.write(measured, arguments.out, f"{report.stem()}-wrapped", command)
    print(f"\n{report.as_text(measured)}\nwritten: {', '.join(map(str, written))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
