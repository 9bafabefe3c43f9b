"""A pretrained model that reads blocks without training, beside itself with its own cache.

    python -m benchmarks.pretrained_cost MODEL
    python -m benchmarks.pretrained_cost FILE.gguf --against llama.cpp

MODEL: a folder of transformers, or a .gguf file. On a GPU where there is one. Beside llama.cpp (`pip install
llama-cpp-python`) a file's weights stay as it has them, and each engine has a process of its own.
"""

import argparse
import importlib.metadata
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from benchmarks import engines, report
from benchmarks.exactness import Inexact
from benchmarks.report import Report, Row, compare, megabytes, per_second
from benchmarks.settings import Say, progress, use_threads
from benchmarks.timing import interleave
from benchmarks.wrapped import RESULTS, bytes_kept, bytes_of
from landmark.experiment.data.stdlib import StandardLibrary
from landmark.models.huggingface import wrap
from landmark.models.huggingface.chunked_forward import read_text
from landmark.models.huggingface.folders import folder_of
from landmark.models.huggingface.safe_loading import open_model, open_tokenizer
from landmark.utils.errors import UserError
from landmark.utils.hardware import peak_memory_bytes, reset_peak_memory
from landmark.utils.source_tree import ROOT

PLAIN, BLOCKS = "its own cache", "blocks"
LOCAL = 512  # tokens that both read at a time


def run(folder: str, lengths: Sequence[int], dtype: str, count: int, rounds: int, say: Say) -> Iterator[Row]:
    """The rows, one after the other.

    folder: of the model. lengths: tokens of the texts. dtype: of the weights. count: tokens generated in a round, after
    the text. rounds: measurements of each. say: shows the progress.
    """
    model, tokenizer = opened(folder, dtype)
    ids = text(tokenizer, max(lengths) + count, model.device)
    say("exactness")
    check(model, ids[:, :200])
    for length in lengths:
        first, more = ids[:, :length], ids[:, length : length + count]
        caches: dict[str, Any] = {}
        say(f"{length:,} tokens")
        readers = {name: reader(model, first, caches, name) for name in (PLAIN, BLOCKS)}
        seconds = interleave(readers, rounds=rounds, warmup=0)  # `check` has read before
        yield from compare("reading", f"{length:,} tokens", "tokens/s", per_second(length, seconds), PLAIN)
        kept = {PLAIN: bytes_of(caches[PLAIN]), BLOCKS: bytes_kept(caches[BLOCKS])}
        yield from compare("memory", f"keys and values of {length:,} tokens", "MB", megabytes(kept), PLAIN)
        writers = {name: writer(model, more, caches[name]) for name in readers}
        seconds = interleave(writers, rounds=rounds)
        yield from compare("generating", f"after {length:,} tokens", "tokens/s", per_second(count, seconds), PLAIN)
        caches.clear()
        if model.device.type == "cuda":  # on a CPU the peak is that of loading
            say(f"peak memory of {length:,} tokens")
            peaks = {name: peak_on_gpu(model, first, more, name) for name in readers}
            yield from compare("memory", f"peak with the weights, {length:,} tokens", "MB", megabytes(peaks), PLAIN)


def beside_llama(path: str, lengths: Sequence[int], ids: Sequence[int], rounds: int, say: Say) -> Iterator[Row]:
    """The rows of both engines, each in new processes, in turn. Raises UserError where one of them fails."""
    found: dict[str, list[dict[str, float]]] = {engines.LLAMA: [], engines.BLOCKS: []}
    given = json.dumps(list(ids))
    for number in range(rounds):
        for engine, results in found.items():
            say(f"{engine}, round {number + 1} of {rounds}")
            command = [sys.executable, "-m", "benchmarks.engines", engine, path, ",".join(map(str, lengths))]
            done = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise UserError(f"{engine} ended with exit status {done.returncode}; its message stands above")
            results.append(json.loads(done.stdout.splitlines()[-1]))
    for key in found[engines.LLAMA][0]:
        part, _, length = key.partition(" ")
        setting = f"{length} tokens" if part in ("reading", "generating") else "cold start" if length else "weights too"
        unit, scale = {"first": ("s", 1.0), "peak": ("MB", 1e-6)}.get(part, ("tokens/s", 1.0))
        values = {name: [result[key] * scale for result in results] for name, results in found.items()}
        yield from compare(key if part == "first" else part, setting, unit, values, engines.LLAMA)


def peak_on_gpu(model: Any, ids: Tensor, more: Tensor, name: str) -> int:
    """Peak bytes of reading a text and generating behind it."""
    torch.cuda.empty_cache()
    reset_peak_memory()
    caches: dict[str, Any] = {}
    reader(model, ids, caches, name)()
    writer(model, more, caches[name])()
    return peak_memory_bytes()


def opened(folder: str, dtype: str) -> tuple[Any, Any]:
    """The model, on a GPU where there is one, and its tokenizer. Raises UserError for a folder without."""
    path = folder_of(folder)
    model, tokenizer = open_model(path, dtype=getattr(torch, dtype)), open_tokenizer(path)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return wrap(model, tokenizer, landmarks="none", local=LOCAL), tokenizer


def text(tokenizer: Any, count: int, device: torch.device) -> Tensor:
    """Ids (1, count) of the source code of Python's standard library."""
    documents, ids = StandardLibrary().documents("train"), list[int]()
    while len(ids) < count:
        ids += tokenizer(next(documents).text).input_ids
    return torch.tensor([ids[:count]], device=device)


def reader(model: Any, ids: Tensor, caches: dict[str, Any], name: str) -> Callable[[], None]:
    """A function that reads a text into a new cache, which it leaves in `caches`."""

    @torch.inference_mode()
    def read() -> None:
        caches[name] = None  # the one of the round before
        past: Any = DynamicCache(config=model.config) if name == PLAIN else model.new_memory()
        caches[name] = past
        if name == BLOCKS:
            past.expect(ids.shape[1])
        for _ in read_text(model, ids, past, most=lambda: LOCAL):
            pass
        wait(ids)

    return read


def writer(model: Any, ids: Tensor, past: Any) -> Callable[[], None]:
    """A function that reads tokens one by one, as `generate` does."""

    @torch.inference_mode()
    def write() -> None:
        for token in ids.split(1, 1):
            model(token, past_key_values=past, use_cache=True)
        wait(ids)

    return write


def version_of_llama() -> str:
    """Of the package. Raises UserError where it is not installed."""
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError("--against llama.cpp: pip install llama-cpp-python first (it is built from source)") from error


def wait(like: Tensor) -> None:
    """Until the device has done what it was asked to."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


@torch.inference_mode()
def check(model: Any, ids: Tensor) -> None:
    """Raise Inexact unless a memory from which every block is read gives the model's own answers.

    Equal are the most probable tokens wherever the second best is clearly less probable, in any type of weights.
    """
    own = model(ids).logits.float()
    found = model(ids, past_key_values=model.new_memory(k=100, window=64)).logits.float()
    best = own.topk(2, -1).values
    clear = best[..., 0] - best[..., 1] > 1
    if not clear.any() or not (own.argmax(-1) == found.argmax(-1))[clear].all():
        raise Inexact("with every block read the model's answers are not its own")


def main(words: Sequence[str]) -> int:
    """Measure, print the table, and write it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained_cost", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--lengths", default="4096,16384", metavar="TOKENS,…", help="of the texts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights (bfloat16 on a GPU)")
    parser.add_argument("--tokens", type=int, default=16, help="generated in a round")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each")
    parser.add_argument("--against", choices=(engines.LLAMA,), help="an engine in place of the model's own cache")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    parser.add_argument("--note", metavar="TEXT", help="written below the table, as what else the machine did")
    arguments = parser.parse_args(words)
    say = progress(time.time())
    use_threads()
    lengths = [int(each) for each in arguments.lengths.split(",")]
    dtype = arguments.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    name = Path(arguments.model).name.removesuffix(".gguf")
    notes = [
        f"{name}, {dtype}; source code, a batch of one, {LOCAL} tokens read at a time, without "
        f"training as `wrap(model, tokenizer, landmarks='none')` reads; transformers {transformers.__version__}."
    ]
    notes += [arguments.note] if arguments.note else []
    shown = shlex.join(["python", "-m", "benchmarks.pretrained_cost", "MODEL", *words[1:]])
    file = "pretrained-cost"
    if arguments.against:
        file = "beside-llama-cpp"
        notes[0] = f"{name} as the file has it; source code, a batch of one; llama-cpp-python {version_of_llama()}."
    measured, written = Report([], notes), []
    try:
        if arguments.against:
            ids = text(open_tokenizer(folder_of(arguments.model)), max(lengths) + engines.TOKENS, torch.device("cpu"))
            rows = beside_llama(arguments.model, sorted(lengths), ids[0].tolist(), arguments.rounds, say)
        else:
            rows = run(arguments.model, lengths, dtype, arguments.tokens, arguments.rounds, say)
        for row in rows:
            measured.rows.append(row)  # on disk at once: a run that is stopped keeps what it has measured
            written = report.write(measured, arguments.out, f"{report.gpu_stem()}-{file}", shown)
    except (Inexact, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{report.as_text(measured)}\nwritten: {', '.join(map(str, written))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
