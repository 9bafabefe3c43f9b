"""One engine that reads a .gguf file, in a process of its own, for `benchmarks.pretrained_cost --against llama.cpp`.

    python -m benchmarks.engines blocks|llama.cpp FILE.gguf TOKENS,…

Prints one line of JSON: seconds from the start of the process to the first token of a short prompt, and, for each
length of a text, tokens read in a second and tokens a second one by one behind them; at the end the peak memory in
bytes. Both engines read the same ids, and the text's own tokens in place of their answers.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from landmark.utils.hardware import peak_memory_bytes

STARTED = time.perf_counter()
THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
BLOCKS, LLAMA = "blocks", "llama.cpp"
SHORT, TOKENS = 16, 16  # of the short prompt; read one by one behind a text
Read = Callable[[Sequence[int]], None]


def of_blocks(path: str, longest: int) -> tuple[Read, Callable[[], None]]:
    """Functions that read further tokens of a text, and begin another one. torch is imported for this engine alone."""
    import torch

    from landmark.models.huggingface import load

    torch.set_num_threads(THREADS)
    model, _ = load(path)
    kept: dict[str, Any] = {}

    def begin() -> None:
        kept["cache"] = model.new_memory()
        kept["cache"].expect(longest)

    @torch.inference_mode()
    def read(ids: Sequence[int]) -> None:
        for _, logits in model.read_text(torch.tensor([list(ids)]), kept["cache"]):
            if logits is not None:
                logits.argmax()

    begin()
    return read, begin


def of_llama(path: str, longest: int) -> tuple[Read, Callable[[], None]]:
    """The same by llama.cpp, with its flash attention."""
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    given: dict[str, Any] = {"n_threads": THREADS, "n_threads_batch": THREADS, "n_batch": 512, "n_ubatch": 512}
    model = Llama(path, n_ctx=longest, flash_attn=True, verbose=False, **given)

    def read(ids: Sequence[int]) -> None:
        model.eval(list(ids))
        model.sample(temp=0.0)

    return read, model.reset


ENGINES = {BLOCKS: of_blocks, LLAMA: of_llama}


def measure(engine: str, path: str, lengths: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
    """See above. lengths: in order. ids: of the text, TOKENS more than the longest."""
    read, begin = ENGINES[engine](path, len(ids) + TOKENS * len(lengths))
    read(ids[:SHORT])
    found: dict[str, Any] = {"first token": time.perf_counter() - STARTED}
    begin()
    spent, at = 0.0, 0
    for length in lengths:
        start = time.perf_counter()
        read(ids[at:length])
        spent += time.perf_counter() - start
        at = length + TOKENS
        seconds = []
        for number in ids[length:at]:
            start = time.perf_counter()
            read([number])
            seconds.append(time.perf_counter() - start)
        found[f"reading {length:,}"] = length / spent
        found[f"generating {length:,}"] = 1 / median(seconds)
        spent += sum(seconds)
    return found | {"peak": peak_memory_bytes()}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("path", metavar="FILE.gguf")
    parser.add_argument("lengths", metavar="TOKENS,…", type=lambda text: [int(each) for each in text.split(",")])
    arguments = parser.parse_args(words)
    print(json.dumps(measure(arguments.engine, arguments.path, arguments.lengths, json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
