"""Reading with a memory and a context miss token: the more lookups it drops, the less time it takes."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.memory import MEMORY, configuration, read_chunks, scale
from benchmarks.report import Report, Row, compare, milliseconds
from benchmarks.settings import Headless, Options, Say
from benchmarks.timing import interleave
from landmark.memory import Memory

# With random weights the token gets about 1 / (keys in the query's block + landmarks in the chunk): these drop some.
CUTOFFS = (0.0, 0.025, 0.04, 1.0)
NO_TOKEN = "without the token"


def run(options: Options, say: Say) -> Report:
    rows: list[Row] = []
    size = scale(options.quick)
    for name, granularity in MEMORY.items():
        say(f"lookups dropped, {granularity}")
        plain, model = (
            Headless(configuration(name, size, cmt=cmt)).eval().requires_grad_(False) for cmt in (False, True)
        )
        tokens = torch.randint(0, size.vocab_size - 64, (size.batch, size.length))
        settings = {"max_blocks": size.blocks, "k": size.k, "granularity": granularity}

        def reader(
            model: Headless, cutoff: float, tokens: torch.Tensor = tokens, settings: dict = settings
        ) -> Callable[[], float]:
            def read() -> float:
                memory = model.new_memory(**settings, cutoff=cutoff)
                assert isinstance(memory, Memory)
                read_chunks(model, tokens, size.chunk, memory)
                return memory.stats.get("drop_rate", 0.0)

            return read

        readers = {NO_TOKEN: reader(plain, 0.0)}
        readers |= {_name(cutoff, reader(model, cutoff)()): reader(model, cutoff) for cutoff in _few(options.quick)}
        seconds = interleave(readers, rounds=1 if options.quick else 2, warmup=0)
        rows += compare("context_miss", f"{size}, {granularity}", "ms", milliseconds(seconds), NO_TOKEN)
    return Report(rows)


def _few(quick: bool) -> Sequence[float]:
    return CUTOFFS[:: len(CUTOFFS) - 1] if quick else CUTOFFS


def _name(cutoff: float, dropped: float) -> str:
    return f"cutoff {cutoff:g}, {100 * dropped:.0f} % dropped"
