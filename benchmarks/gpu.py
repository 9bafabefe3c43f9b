"""What the Triton kernels compute, and how long they take, on one GPU: `python -m benchmarks.gpu`.

Checks come first (`benchmarks.kernels`), then timings; both begin with what is most worth knowing. Each item runs in a
process of its own. All results are in one JSON file, which is written after each item. The same command, called again,
does what failed, was interrupted, or had no time left.
"""

import argparse
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import kernels
from benchmarks.attention import Attention, forward_backward
from benchmarks.kernels import GPU, ROOM, SIZES, TINY, Line, Scale, Size
from benchmarks.report import Target, gpu_stem
from benchmarks.settings import BLOCK_SIZE, GPT2Vocabulary, decoder
from benchmarks.timing import Spread, ratios
from landmark.attention import Scoring, Window, landmark_attention
from landmark.attention.plain import attention_forward, merged
from landmark.memory import UnlimitedMemory
from landmark.memory.blocks.cache import BlockCache
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.models import Decoder, DecoderConfig
from landmark.models.config import Landmarks
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.hardware import hardware
from landmark.utils.source_tree import commit
from landmark.utils.window_batch import WindowBatch

RESULTS = Path(__file__).parent / "results"
SHARE = 0.5  # of the time, at most, for checks
OURS, PLAIN, FLASH, CUDNN = "landmark", "plain transformer", "flash SDPA", "cuDNN SDPA"
WINDOWS = {64: Target("≤", 1.15), 51: Target("≤", 1.3)}  # of forward and backward, by W
FASTER = {4_000: Target("≤", 1.0), 128_000: Target("≤", 0.2)}  # than the plain transformer, by tokens before
BLOCKS = {4_096: Target("≤", 0.67), 32_768: Target("≤", 0.5), 131_072: Target("≤", 0.25)}  # than DynamicCache
CACHE = 256 << 20  # bytes, of more than any cache

Times = dict[str, list[list[float]]]  # by competitor, seconds of the rounds on the device, and on the host


class Item(NamedTuple):
    """A check; or a timing, which has the device to itself. run: yields a line for each case."""

    name: str
    run: Callable[[Scale], Iterator[Line]]
    alone: bool = False


def items_of(scale: Scale) -> list[Item]:
    """All items, the most valuable first: whole models, the type that is timed, other kernels, other types."""
    found = [
        Item("graph of a landmark model", partial(kernels.graphs, 4_000 if scale.is_gpu else 300)),
        Item("graph of a pretrained model", partial(kernels.pretrained_graph, 8_192 if scale.is_gpu else 40)),
    ]
    for number, dtype in enumerate(scale.dtypes):
        kind = str(dtype).removeprefix("torch.")
        for dim in scale.dims:
            found.append(Item(f"blocks, tokens {kind} d={dim}", partial(kernels.tokens, dtype, dim)))
            if dtype != torch.float32:  # where chunks have no kernels
                found.append(Item(f"blocks, chunks {kind} d={dim}", partial(kernels.chunks, dtype, dim)))
            for width in scale.widths:
                for check in (kernels.windows, kernels.retrieved, kernels.tiles):
                    found.append(Item(f"{check.__name__} {kind} d={dim} W={width}", partial(check, dtype, dim, width)))
        for check in (kernels.loss_of_head, kernels.rotations):
            found.append(Item(f"{check.__name__} {kind}", partial(check, dtype)))
        if number == 0:
            found += [Item(check.__name__, check) for check in (kernels.best_landmarks, kernels.tiers)]
    contexts = {"nano": (4_000, 128_000, 1_000_000), "paper": (4_000, 128_000)} if scale.is_gpu else {"tiny": (150,)}
    lengths = (4096, 16384) if scale.is_gpu else (24,)
    trained = ("small", "paper") if scale.is_gpu else ("tiny",)
    shapes = [(T, dim, W, 1) for W in scale.widths for dim in scale.dims for T in lengths]
    shapes.append((shapes[0][0], scale.dims[0], scale.widths[0], scale.group))
    timings = {
        "a pretrained model's token": partial(pretrained_token, (4_096, 32_768, 131_072) if scale.is_gpu else (40,)),
        "a chunk that reads blocks": partial(chunk, (4_096, 16_384, 65_536) if scale.is_gpu else (40,)),
        **{f"windows T={T} d={dim} W={W} {g}:1": partial(windows, T, dim, W, g) for T, dim, W, g in shapes},
        **{f"a token, {name}": partial(token, SIZES[name], each) for name, each in contexts.items()},
        **{f"a step, {name}": partial(step, SIZES[name]) for name in trained},
    }
    return found + [Item(f"time: {name}", run, alone=True) for name, run in timings.items()]


# ---- timings


def timed(functions: Mapping[str, Callable[[], object]], scale: Scale, whole: bool = False) -> Times:
    """Seconds on the device and on the host, of each round, of functions that take turns after three calls each.

    On a GPU a call is launched behind a pause of the device, so that all its kernels wait in the queue, and events
    around it measure the kernels alone. whole: the time until the device is done, launches included, is measured in
    their place. Before each call a write to a large tensor takes the inputs out of the cache.
    """
    times, launches = {name: [[], []] for name in functions}, dict.fromkeys(functions, 0.0)
    cache = torch.empty(CACHE if scale.is_gpu else 1, dtype=torch.int8, device=scale.device)
    for number in range(scale.rounds + 3):
        for name, function in functions.items():
            cache.zero_()
            launches[name], until_done = _launched(function, scale)
            device = until_done if whole or not scale.is_gpu else _on_device(function, launches[name], cache)
            if number >= 3:  # compiled and captured by now
                times[name][0].append(device)
                times[name][1].append(launches[name])
    return times


def _launched(function: Callable[[], object], scale: Scale) -> tuple[float, float]:
    """Seconds until a call has returned, and until the device has done all of it."""
    wait = torch.cuda.synchronize if scale.is_gpu else lambda: None
    wait()
    started = time.perf_counter()
    function()
    returned = time.perf_counter()
    wait()
    return returned - started, time.perf_counter() - started


def _on_device(function: Callable[[], object], host: float, cache: Tensor) -> float:
    """Seconds that the device computes. host: that the call takes to launch its kernels."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cache.zero_()
    torch.cuda._sleep(int(2e9 * min(2 * host + 1e-4, 0.05)))  # cycles
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def lines(what: str, times: Times, against: str, target: Target | None = None) -> Iterator[Line]:
    """Of each competitor median and quartiles in milliseconds, and of ratios in a round. target: of the first."""
    for number, (name, (device, host)) in enumerate(times.items()):
        spreads = {"device_ms": Spread.of([1e3 * x for x in device]), "host_ms": Spread.of([1e3 * x for x in host])}
        spreads["ratio"] = ratios(device, times[against][0])
        line = {"what": what, "measured": name, "against": against}
        line |= {key: [float(f"{x:.4g}") for x in (each.median, each.low, each.high)] for key, each in spreads.items()}
        if target is not None and number == 0:
            line |= {"target": str(target), "met": target.met(spreads["ratio"].median)}
        yield line


def windows(length: int, dim: int, width: int, group: int, scale: Scale) -> Iterator[Line]:
    """Attention of training windows, whose last queries are checked first: nothing inexact is timed."""
    batch, heads = max(1, scale.tokens // length), max(group, scale.width // dim)
    leaves, grad = kernels.leaves_of(scale, (batch, heads, length, dim), group, scale.dtypes[0])
    phase = torch.arange(batch) * (width - 1) % width
    last = slice(max(0, length - 128), None)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return landmark_attention(q, k, v, Window(width - 1, phase), backend="triton")[0]

    def causal(kernel: SDPBackend) -> Attention:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)

        return attend

    def of_last(by_kernels: bool, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x[:1, : group if number == 0 else 1].to(dtype) for number, x in enumerate(leaves))
        if by_kernels:
            return [ours(*leaves)[:1, :group, last]]
        window = Window(width - 1, phase[:1], max(0, length - 128))
        return [landmark_attention(q[:, :, last], k, v, window, backend="reference")[0]]

    yield (exact := kernels.compared("the last queries", of_last, scale.dtypes[0]))
    if not exact["ok"]:
        return
    attends = {OURS: ours, FLASH: causal(SDPBackend.FLASH_ATTENTION if scale.is_gpu else SDPBackend.MATH)}
    if scale.is_gpu:
        attends[CUDNN] = causal(SDPBackend.CUDNN_ATTENTION)
    steps = {name: forward_backward(attend, leaves, grad) for name, attend in attends.items()}
    forward = {name: partial(torch.no_grad()(attend), *leaves) for name, attend in attends.items()}
    what = f"T={length}, d={dim}, W={width}, {group}:1"
    yield from lines(f"{what}, forward", timed(forward, scale), FLASH)
    yield from lines(f"{what}, forward and backward", timed(steps, scale), FLASH, WINDOWS.get(width))


@torch.no_grad()
def chunk(lengths: Sequence[int], scale: Scale) -> Iterator[Line]:
    """A chunk of a text without landmarks, as a layer of a pretrained model reads it, beside attention to all keys."""
    heads, kv_heads, dim, count = (14, 2, 64, 2048) if scale.is_gpu else (2, 1, 16, 8)
    block, given = (32, {"dense": 0}) if scale.is_gpu else (4, {"dense": 0, "k": 2, "window": 8})
    settings = vars(BlockCacheSettings().updated(given))

    def read(memory: BlockCache, part: Sequence[Tensor], keep: bool = False) -> None:
        memory.attend(0, part[0], part[1], part[2], Scoring(), None)
        memory.commit() if keep else memory.discard()

    def read_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [(False, slice(None, -count)), (True, slice(-count, None))]
        how = {"scale": q.shape[-1] ** -0.5}
        return merged(*(attention_forward(q, k[:, :, at], v[:, :, at], causal=own, **how) for own, at in parts))[0]

    for length in lengths:
        sizes = [(1, n, length, dim) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (scale.normal(*size, seed=seed, dtype=scale.dtypes[0]) for seed, size in enumerate(sizes))
        memory = BlockCache(block, **settings, frequencies=torch.ones(dim // 2, device=scale.device), positions=length)
        memory.expect(length)
        for start in range(0, length - count, count):
            read(memory, [x[:, :, start : min(start + count, length - count)] for x in (q, k, v)], keep=True)
        memory.begin(True)
        all_keys = [x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
        competitors: dict[str, Callable[[], object]] = {
            OURS: partial(read, memory, [x[:, :, -count:] for x in (q, k, v)])
        }
        competitors[FLASH] = partial(read_all, q[:, :, -count:], *all_keys)
        yield from lines(f"{count} tokens behind {length - count:,}", timed(competitors, scale), FLASH)


class Filled(UnlimitedMemory):
    """Random keys and values of a whole text."""

    def __init__(self, size: Size, context: int, like: Tensor):
        super().__init__(context + ROOM)
        shape = 1, size.num_heads, self.cache, size.head_dim
        made = partial(torch.randn, shape, dtype=like.dtype, device=like.device)
        self._cached |= {layer: (made(), made()) for layer in range(size.num_layers)}
        self._read = context


@torch.no_grad()
def token(size: Size, contexts: Sequence[int], scale: Scale) -> Iterator[Line]:
    """A token after a memory of random blocks, as a CUDA graph, beside a plain transformer."""
    model, plain = (decoder(size, kind).to(scale.device, scale.dtypes[0]) for kind in ("landmark", "transformer"))
    ids, ours = torch.zeros(1, 1, dtype=torch.int64, device=scale.device), {}
    for context in contexts:
        read_next = kernels.graph_of(model, kernels.filled(model, context, "triton"))
        dense = Filled(size, context, model.embedding.weight)
        times = timed({OURS: partial(read_next, ids), PLAIN: partial(plain, ids, dense)}, scale)
        ours[f"after {context:,}"] = times[OURS]
        yield from lines(f"a token after {context:,}", times, PLAIN, FASTER.get(context))
        del read_next, dense
    yield from lines("a token", ours, next(iter(ours)))


@torch.no_grad()
def pretrained_token(contexts: Sequence[int], scale: Scale) -> Iterator[Line]:
    """A token of a pretrained model until the device is done, beside the caches of transformers."""
    from transformers import DynamicCache, StaticCache

    model = kernels.pretrained_model(scale, scale.dtypes[0])
    ids = torch.zeros(1, 1, dtype=torch.int64, device=scale.device)
    compiled = torch.compile(model, mode="reduce-overhead") if scale.is_gpu else model
    for context in contexts:
        dynamic: Any = DynamicCache(config=model.config)
        static: Any = StaticCache(config=model.config, max_cache_len=context + ROOM)
        for layer, (keys, values) in enumerate(kernels.keys_of(model, context, scale)):
            dynamic.update(keys, values, layer)
            static.update(keys, values, layer)
        competitors: dict[str, Callable[[], object]] = {
            "blocks": partial(model, ids, past_key_values=kernels.blocks_of_text(model, context, scale)),
            "DynamicCache": partial(model, ids, past_key_values=dynamic),
            "StaticCache, compiled": partial(compiled, ids, past_key_values=static),
        }
        what = f"a token after {context:,}"
        yield from lines(what, timed(competitors, scale, whole=True), "DynamicCache", BLOCKS.get(context))


def step(size: Size, scale: Scale) -> Iterator[Line]:
    """A training step: forward, backward and AdamW on a batch of random tokens, in bfloat16 autocast on a GPU."""
    steps = {OURS: _step(size, True, scale), PLAIN: _step(size, False, scale)}
    yield from lines(f"{size.batch} × {size.length} tokens", timed(steps, scale), PLAIN, Target("≤", 1.1))


def _step(size: Size, has_landmarks: bool, scale: Scale) -> Callable[[], object]:
    words, widths = GPT2Vocabulary(), (size.num_layers, size.num_heads, size.head_dim, size.mlp_dim)
    landmarks = Landmarks(words.landmark, BLOCK_SIZE) if has_landmarks else None
    backend = "auto" if scale.is_gpu else "triton"
    model = Decoder(DecoderConfig(words.vocab_size, *widths, landmarks=landmarks, backend=backend)).to(scale.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens, phase = torch.randint(words.eot, (size.batch, size.length + 1)), torch.arange(size.batch) * 7 % BLOCK_SIZE
    if has_landmarks:
        closes = (phase[:, None] + torch.arange(size.length + 1)) % (BLOCK_SIZE + 1) == BLOCK_SIZE
        tokens = torch.where(closes, words.landmark, tokens)
    tokens = tokens.to(scale.device)
    batch = WindowBatch(tokens[:, :-1], tokens[:, 1:], phase if has_landmarks else None)

    def one() -> None:
        with torch.autocast(scale.device, torch.bfloat16, enabled=scale.is_gpu):
            for loss, targets in model.window_losses(batch):
                (loss / targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return one


# ---- items in processes of their own, and their results


def done(item: Item, scale: Scale) -> Line:
    """Do an item: its lines, and whether all is well."""
    found: list[Line] = []
    try:
        found.extend(item.run(scale))
    except Exception as error:  # whatever it is, other items go on
        return {"status": "failed", "error": f"{type(error).__name__}: {error}".splitlines()[0], "lines": found}
    return {"status": "failed" if any(line.get("ok") is False for line in found) else "ok", "lines": found}


def _send(item: Item, scale: Scale, pipe: Any) -> None:
    pipe.send(done(item, scale))


class Results:
    """One JSON file: the calls, and by item its status, lines, seconds and the number of its call."""

    def __init__(self, path: Path, command: str):
        self._path = path
        self._found: dict[str, Any] = read_json(path) if path.exists() else {"calls": [], "items": {}}
        versions = {name: version(name) for name in ("torch", "triton")} | {"python": platform.python_version()}
        origin = {"command": command, "commit": commit(), "hardware": hardware(), "versions": versions}
        self._found["calls"].append(origin | {"time": datetime.now(UTC).isoformat(timespec="seconds")})

    def is_done(self, name: str) -> bool:
        return self._found["items"].get(name, {}).get("status") == "ok"

    def add(self, name: str, found: Line) -> None:
        self._found["items"][name] = {"call": len(self._found["calls"]) - 1, **found}
        write_json(self._path, self._found)
        print(f"{found['status']:9} {name} {found.get('error', '')}", flush=True)
        for line in found.get("lines", ()):
            if "ratio" in line or not line["ok"]:
                print("         ", *(f"{key}={value}" for key, value in line.items()), flush=True)


def run(items: Sequence[Item], scale: Scale, results: Results, seconds: float, processes: int) -> bool:
    """Do items beside each other, and return whether all are well. What has not ended after `seconds` is ended."""
    context, until = get_context("spawn"), time.monotonic() + seconds
    left, well = list(items), True
    running: dict[Any, tuple[Item, Any, float]] = {}
    while (left or running) and (wait := until - time.monotonic()) > 0:
        while left and len(running) < processes:
            item, (receive, send) = left.pop(0), context.Pipe(False)
            process = context.Process(target=_send, args=(item, scale, send), daemon=True)
            process.start()
            send.close()
            running[receive] = item, process, time.monotonic()
        ready: list[Any] = connection.wait(running, wait)
        for pipe in ready:
            item, process, started = running.pop(pipe)
            try:
                found = pipe.recv()
            except EOFError:
                process.join()
                found = {"status": "failed", "error": f"its process ended with {process.exitcode}"}
            process.join()
            well = well and found["status"] == "ok"
            results.add(item.name, found | {"seconds": round(time.monotonic() - started, 1)})
    for _, process, _ in running.values():
        process.kill()
    for item in [*(item for item, *_ in running.values()), *left]:
        results.add(item.name, {"status": "no time"})
    return well and not left and not running


def main(words: Sequence[str], items: Sequence[Item] | None = None) -> int:
    """Do what is asked, and return the exit status. items: None: all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=str(__doc__).partition(":")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="that all may take (8)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results (benchmarks/results/GPU.json)")
    parser.add_argument("--only", metavar="WORDS,…", default="", help="items whose names begin with one of these")
    parser.add_argument("--processes", type=int, default=12, help="that compile and check beside each other (12)")
    parser.add_argument("--tiny", action="store_true", help="a first try: tiny shapes on a CPU, kernels interpreted")
    parser.add_argument("--list", action="store_true", help="name the items")
    given = parser.parse_args(words)
    scale = TINY if given.tiny else GPU
    items = items_of(scale) if items is None else items
    items = [item for item in items if item.name.startswith(tuple(given.only.split(",")))]
    if given.list:
        print(*(item.name for item in items), sep="\n")
        return 0
    if given.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print("error: torch sees no GPU: run this on a machine with a GPU, or with --tiny", file=sys.stderr)
        return 1
    end = time.monotonic() + 60 * given.minutes
    command = shlex.join(["python", "-m", "benchmarks.gpu", *words])
    try:
        results = Results(given.out or RESULTS / f"{gpu_stem()}.json", command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    items = [item for item in items if not results.is_done(item.name)]
    checks, timings = ([item for item in items if item.alone == kind] for kind in (False, True))
    share = 60 * given.minutes * (SHARE if timings else 1)
    well = run(checks, scale, results, share, given.processes)
    return 0 if run(timings, scale, results, end - time.monotonic(), 1) and well else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it has started, too
    sys.exit(main(sys.argv[1:]))
