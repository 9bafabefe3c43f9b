"""Search of a memory by an index of its landmarks: time and blocks found, against a scan.

The landmarks are those of a text, read by a trained model or, without `--run`, by random weights.
"""

import time
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.growth import scale
from benchmarks.report import Report, Row
from benchmarks.settings import BLOCK_SIZE, Options, Say, decoder
from benchmarks.timing import Spread, interleave, ratios
from landmark.data import load_tokenizer
from landmark.data.sources import open_source
from landmark.memory import Memory
from landmark.memory.layer import LayerMemory, Question
from landmark.memory.select import Best, Faiss, Selector
from landmark.memory.store import BlockStore
from landmark.models import Decoder, load
from landmark.utils.constants import DEFAULT_CHUNK

SCAN, INVERTED = "scan of all landmarks", "faiss, inverted file"
CHUNK, TOKEN, BUILD, RECALL = (
    "search for a chunk",
    "search for a token",
    "making the index",
    "share of a scan's blocks found",
)
CANDIDATES = 16


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
class Noting(Best):
    """Notes what is asked, with a copy of the landmarks, where these have not all equal scores."""

    asked: list[Question] = field(default_factory=list)

    def choose(self, question: Question, k: int) -> Tensor:
        if not self.is_tied(question):
            store = question.store
            self.asked.append(with_landmarks(question, store.landmarks[:, :, : len(store)].clone()))
        return super().choose(question, k)


def run(options: Options, say: Say) -> Report:
    size = Scale((500, 1000, 6000), 1000, chunk=100, rounds=2) if options.quick else Scale()
    model, tokens = reader(options, size)
    memory = model.new_memory(k=0)
    assert isinstance(memory, Memory)
    rows: list[Row] = []
    asked: list[Question] = []
    for context in size.contexts:
        say(f"{context:,} tokens")
        if context <= size.read:
            read(model, memory, tokens[memory.position - memory.position // (BLOCK_SIZE + 1) : context])
            asked = questions(model, memory, tokens[context : context + size.chunk], size)
        else:
            asked = [resampled(each, context, size) for each in asked]
        rows += measure(context, asked, size)
    whose = "a trained model" if options.run else "random weights"
    pays = [f"{what} takes less time by {INVERTED} {faster_from(rows, what)}" for what in (CHUNK, TOKEN)]
    return Report(rows, [f"Landmarks of {whose}, {layers(asked)}: {'; '.join(pays)}."])


def faster_from(rows: list[Row], what: str) -> str:
    """The context from which on the index is faster than the scan, in words."""
    ratio = {
        row.context or 0: row.ratio.median for row in rows if row.measured == INVERTED and row.setting.startswith(what)
    }
    slower = max((context for context, value in ratio.items() if value >= 1), default=0)
    found = [context for context in ratio if context > slower]
    return f"from {min(found):,} tokens on" if found else "nowhere"


def layers(asked: list[Question]) -> str:
    _, _, _, heads, dim = asked[0].exact.shape
    return f"{len(asked)} layers that are searched, {heads} heads of {dim}"


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
def questions(model: Decoder, memory: Memory, chunk: Tensor, size: Scale) -> list[Question]:
    """What the layers that read this chunk ask, without layers where landmarks have equal scores."""
    noting = Noting()
    memory.k, memory.select = size.k, noting
    model(chunk[None], memory=memory, last=True)
    return noting.asked


def with_landmarks(question: Question, landmarks: Tensor) -> Question:
    """The same question about a layer that has these landmarks and nothing else."""
    store = BlockStore()
    store.summaries["landmarks"], store.added, store.capacity = landmarks, landmarks.shape[2], landmarks.shape[2]
    return replace(question, state=LayerMemory(store))


def resampled(question: Question, context: int, size: Scale) -> Question:
    landmarks, blocks = question.store.landmarks, context // BLOCK_SIZE
    known = landmarks.shape[2]
    rows = torch.randint(0, known, (blocks - known,), generator=torch.Generator().manual_seed(0))
    more = landmarks[:, :, rows]
    more = more + size.noise * landmarks.std() * torch.randn(more.shape)
    return with_landmarks(question, torch.cat([more, landmarks], 2))


def measure(context: int, asked: list[Question], size: Scale) -> list[Row]:
    rows: list[Row] = []

    def add(what: str, unit: str, factor: float, values: dict[str, list[float]], against: str) -> None:
        for name, each in values.items():
            spread = Spread.of([factor * value for value in each])
            setting = f"{what}, {context:,} tokens"
            rows.append(
                Row("search", setting, name, against, unit, spread, ratios(each, values[against]), None, context)
            )

    selectors = {SCAN: Best(), INVERTED: Faiss(CANDIDATES)}
    found: dict[str, list[Tensor]] = {}
    making: dict[str, list[float]] = {}
    for name, select in selectors.items():
        started = time.perf_counter()
        found[name] = chosen(select, asked, size.k)
        making[name] = [time.perf_counter() - started]
    for what, few in ((CHUNK, False), (TOKEN, True)):
        functions = {
            name: partial(chosen, select, [one_token(each) for each in asked] if few else asked, size.k)
            for name, select in selectors.items()
        }
        add(what, "ms", 1e3, interleave(functions, rounds=size.rounds, clock=time.process_time), SCAN)
    add(BUILD, "ms", 1e3, {INVERTED: making[INVERTED]}, INVERTED)
    add(RECALL, "share", 1.0, {name: [recall(each, found[SCAN])] for name, each in found.items()}, SCAN)
    return rows


def one_token(question: Question) -> Question:
    """The question of the chunk's last token."""
    return replace(question, q=question.q[:, :, -1:], start=question.start + question.q.shape[2] - 1)


def chosen(select: Selector, asked: list[Question], k: int) -> list[Tensor]:
    return [select.choose(each, k) for each in asked]


def recall(found: list[Tensor], scanned: list[Tensor]) -> float:
    """The share of a scan's blocks that are found."""
    shares = [(ages[..., :, None] == exact[..., None, :]).any(-2).float().mean() for ages, exact in zip(found, scanned)]
    return float(torch.stack(shares).mean())
