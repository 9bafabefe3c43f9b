"""Search of a memory by an index of its landmarks, or by groups of them: time and blocks found, against a scan.

The landmarks are those of a text, read by a trained model or, without `--run`, by random weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.growth import scale
from benchmarks.report import Report, Row, Target
from benchmarks.settings import BLOCK_SIZE, Options, Say, decoder
from benchmarks.timing import Spread, interleave, ratios
from landmark.attention.hierarchy import Hierarchy, first_bias
from landmark.data import load_tokenizer
from landmark.data.sources import open_source
from landmark.memory import Memory
from landmark.memory import memory as memory_module
from landmark.memory.block_store import BlockStore
from landmark.memory.hierarchy import Descent, GroupKeys
from landmark.memory.index import LandmarkIndex, retrieve_candidates
from landmark.models import Decoder, load
from landmark.utils.constants import DEFAULT_CHUNK

SCAN, FLAT, INVERTED = "scan of all landmarks", "faiss, flat", "faiss, inverted file"
KINDS = {FLAT: "flat", INVERTED: "ivf"}
HIERARCHIES = {"two levels of groups of 8": (8, 2), "four levels of groups of 8": (8, 4)}  # fan-out, levels
CHUNK, TOKEN, BUILD, RECALL = (
    "search for a chunk",
    "search for a token",
    "making the index",
    "share of a scan's blocks found",
)
BOUNDED, BOXES = "share of landmarks that bounds leave to score", "boxes of 8 landmarks"
CANDIDATES = 16
TARGETS = {1_000_000: Target("≤", 0.15), 4_000_000: Target("≤", 0.08)}  # of a token, by descents


@dataclass(frozen=True)
class Scale:
    """contexts: in tokens. Up to the context `read`, landmarks are a text's; beyond, they are resampled with noise."""

    contexts: tuple[int, ...] = (4_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000)
    read: int = 256_000
    noise: float = 0.1  # of the landmarks' standard deviation
    chunk: int = DEFAULT_CHUNK
    k: int = 4
    rounds: int = 5


@dataclass(frozen=True)
class Search:
    """The queries of one layer, and the store that they search."""

    rotated_queries: Tensor
    store: BlockStore
    settings: dict


def run(options: Options, say: Say) -> Report:
    size = Scale((500, 1000, 6000), 1000, chunk=100, rounds=2) if options.quick else Scale()
    model, tokens = reader(options, size)
    memory = model.new_memory(k=0)
    assert isinstance(memory, Memory)
    rows: list[Row] = []
    searches: list[Search] = []
    for context in size.contexts:
        say(f"{context:,} tokens")
        if context <= size.read:
            read(model, memory, tokens[memory.position - memory.position // (BLOCK_SIZE + 1) : context])
            searches = searched(model, memory, tokens[context : context + size.chunk], size)
        else:
            searches = [
                Search(each.rotated_queries, resampled(each.store, context, size), each.settings) for each in searches
            ]
        rows += measure(context, searches, size)
    whose = "a trained model" if options.run else "random weights"
    found = ((what, name) for what in (CHUNK, TOKEN) for name in (*KINDS, *HIERARCHIES))
    pays = [f"{what} takes less time by {name} {faster_from(rows, what, name)}" for what, name in found]
    return Report(rows, [f"Landmarks of {whose}, {layers(searches)}: {'; '.join(pays)}."])


def faster_from(rows: list[Row], what: str, name: str) -> str:
    """The context from which on an index is faster than the scan, in words."""
    ratio = {
        row.context or 0: row.ratio.median for row in rows if row.measured == name and row.setting.startswith(what)
    }
    slower = max((context for context, value in ratio.items() if value >= 1), default=0)
    found = [context for context in ratio if context > slower]
    return f"from {min(found):,} tokens on" if found else "nowhere"


def layers(searches: list[Search]) -> str:
    _, _, _, heads, dim = searches[0].rotated_queries.shape
    return f"{len(searches)} layers that are searched, {heads} heads of {dim}"


def reader(options: Options, size: Scale) -> tuple[Decoder, Tensor]:
    """The model, and a text in its tokens."""
    model = decoder(scale(options.quick), "landmark") if options.run is None else load(options.run)
    assert isinstance(model, Decoder)
    wide = model.config.vocab_size
    tokenizer = (
        load_tokenizer("bytes")
        if wide == 320
        else load_tokenizer("gpt2", options.ranks, wide if wide < 50304 else None)
    )
    corpus = "pg19" if options.text is not None and (options.text / "train").is_dir() else "stdlib"
    parts, wanted = [], size.read + size.chunk
    for document in open_source(corpus, options.text).documents("train"):
        parts.append(tokenizer.encode(document.text or ""))
        if sum(map(len, parts)) >= wanted:
            break
    return model, torch.from_numpy(np.concatenate(parts)[:wanted].astype(np.int64))


@torch.no_grad()
def read(model: Decoder, memory: Memory, tokens: Tensor) -> None:
    """Read without retrieval, which would take long and change the landmarks little."""
    memory.k = 0
    for chunk in tokens.split(20 * BLOCK_SIZE):
        model(chunk[None], memory=memory, last=True)


@torch.no_grad()
def searched(model: Decoder, memory: Memory, chunk: Tensor, size: Scale) -> list[Search]:
    """The searches of the layers that read this chunk, without layers where landmarks have equal scores."""
    searches: list[Search] = []
    retrieve = memory_module.retrieve

    def note(rotated_queries: Tensor, store: BlockStore, **settings) -> Tensor:
        if not settings["tie"]:
            searches.append(Search(rotated_queries, snapshot(store), settings))
        return retrieve(rotated_queries, store, **settings)

    memory.k = size.k
    with mock.patch.object(memory_module, "retrieve", note):
        model(chunk[None], memory=memory, last=True)
    return searches


def snapshot(store: BlockStore) -> BlockStore:
    """A store with a copy of the landmarks and nothing else."""
    return with_landmarks(store.landmarks[:, :, : len(store)].clone())


def with_landmarks(landmarks: Tensor) -> BlockStore:
    store = BlockStore(None)
    store.landmarks, store.added, store.capacity = landmarks, landmarks.shape[2], landmarks.shape[2]
    return store


def resampled(store: BlockStore, context: int, size: Scale) -> BlockStore:
    blocks = context // BLOCK_SIZE
    rows = torch.randint(0, len(store), (blocks - len(store),), generator=torch.Generator().manual_seed(0))
    more = store.landmarks[:, :, rows]
    more = more + size.noise * store.landmarks.std() * torch.randn(more.shape)
    return with_landmarks(torch.cat([more, store.landmarks], 2))


def measure(context: int, searches: list[Search], size: Scale) -> list[Row]:
    rows: list[Row] = []

    def add(what: str, unit: str, factor: float, values: dict[str, list[float]], against: str) -> None:
        for name, each in values.items():
            spread = Spread.of([factor * value for value in each])
            base = values.get(against, each)
            setting = f"{what}, {context:,} tokens"
            target = TARGETS.get(context) if what == TOKEN and name in HIERARCHIES else None
            rows.append(Row("search", setting, name, against, unit, spread, ratios(each, base), target, context))

    indices = {name: [LandmarkIndex(kind, CANDIDATES) for _ in searches] for name, kind in KINDS.items()}
    found: dict[str, list[Tensor]] = {}
    making: dict[str, list[float]] = {}
    for name, made in indices.items():
        started = time.perf_counter()
        found[name] = candidates(searches, made)
        making[name] = [time.perf_counter() - started]
    groups = {name: [GroupKeys(*shape) for _ in searches] for name, shape in HIERARCHIES.items()}
    for name, made in groups.items():
        started = time.perf_counter()
        for each, keys in zip(searches, made, strict=True):
            keys.update(each.store)
        making[name] = [time.perf_counter() - started]
        found[name] = descents(searches, made)
    scanned = scan(searches)
    for what, asked in ((CHUNK, searches), (TOKEN, [one_token(each) for each in searches])):
        functions: dict[str, Callable[[], object]] = {SCAN: lambda asked=asked: scan(asked)}
        for name, made in indices.items():
            functions[name] = lambda asked=asked, made=made: candidates(asked, made)
        for name, made in groups.items():
            functions[name] = lambda asked=asked, made=made: descents(asked, made)
        add(what, "ms", 1e3, interleave(functions, rounds=size.rounds, clock=time.process_time), SCAN)
    add(BUILD, "ms", 1e3, making, FLAT)
    recalls = {name: [recall(each, scanned)] for name, each in found.items()}
    add(RECALL, "share", 1.0, {SCAN: [1.0], **recalls}, SCAN)
    if context <= size.read:
        add(BOUNDED, "share", 1.0, {BOXES: [left_by_boxes(searches, 8)]}, BOXES)
    return rows


def one_token(search: Search) -> Search:
    return Search(search.rotated_queries[:, :, -1:], search.store, search.settings)


def scan(searches: list[Search]) -> list[Tensor]:
    return [memory_module.retrieve(each.rotated_queries, each.store, **each.settings) for each in searches]


def candidates(searches: list[Search], indices: list[LandmarkIndex]) -> list[Tensor]:
    return [
        retrieve_candidates(
            each.rotated_queries,
            each.store,
            index,
            k=each.settings["k"],
            granularity=each.settings["granularity"],
            num_recent=each.settings["num_recent"],
        )
        for each, index in zip(searches, indices, strict=True)
    ]


def descents(searches: list[Search], groups: list[GroupKeys]) -> list[Tensor]:
    """The blocks that descents through groups find.

    The time does not depend on the landmarks, so those of a model that was trained without groups will do.
    """
    found = []
    for each, made in zip(searches, groups, strict=True):
        heads = each.rotated_queries.shape[3]
        hierarchy = Hierarchy(made.fan_out, first_bias(made.fan_out, len(made.counts), heads))
        descent = Descent(each.store, made, hierarchy, each.settings["num_recent"], tie=False)
        descent.score_open(each.rotated_queries)
        found.append(descent.retrieve(each.rotated_queries, each.settings["k"], None)[0])
    return found


def left_by_boxes(searches: list[Search], size: int) -> float:
    """The share of landmarks that an exact search with bounds would have to score.

    The box of a group of `size` neighbouring landmarks has the least and the largest number of each channel. The score
    of a landmark in it is at most the sum over channels of the larger product with one of the two. A search that visits
    groups by these bounds, best first, may stop at the k-th best score.
    """
    shares = []
    for each in searches:
        groups = len(each.store) // size
        keys = each.store.landmarks[:, :, : groups * size]
        q = each.rotated_queries[-1].transpose(1, 2)
        keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
        least, largest = keys.unflatten(2, (groups, size)).aminmax(dim=3)
        bounds = q.clamp(min=0) @ largest.mT + q.clamp(max=0) @ least.mT
        best = (q @ keys.mT).topk(min(each.settings["k"], keys.shape[2])).values[..., -1:]
        shares.append((bounds >= best).float().mean())
    return float(torch.stack(shares).mean())


def recall(found: list[Tensor], scanned: list[Tensor]) -> float:
    """The share of a scan's blocks that are found."""
    shares = [(ages[..., :, None] == exact[..., None, :]).any(-2).float().mean() for ages, exact in zip(found, scanned)]
    return float(torch.stack(shares).mean())
