"""How well landmarks find the place that a text was torn from: books without the second half of some sentences.

A query is that half; what is to be found are the blocks that hold the first half. Beside it stand BM25 on the same
blocks, and chance.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from landmark.retriever import Block, Retriever, cut
from landmark.utils.errors import UserError
from landmark.utils.peak_memory import peak_memory_bytes, reset_peak_memory
from landmark.utils.significance import clopper_pearson

if TYPE_CHECKING:
    from landmark.data.stream import Stream
    from landmark.data.tokenizer import Tokenizer

RANKERS = ("landmark", "bm25", "chance")
SENTENCE = re.compile(r"(?<=[.!?]\s)[A-Z][^.!?]*[.!?]")
WORDS = range(16, 41)  # of a sentence that may be torn
AT = 1, 10


@dataclass(frozen=True)
class Torn:
    """Documents (name, text) without the second halves of some sentences. queries: those halves; first: for each the
    number of its document, and the bytes from and to which the first half stands in it now."""

    documents: list[tuple[str, str]]
    queries: list[str]
    first: list[tuple[int, int, int]]


def documents(stream: Stream, tokenizer: Tokenizer) -> list[str]:
    """The texts of a stream."""
    tokens = np.asarray(stream.tokens)
    ends = np.flatnonzero(tokens == tokenizer.eot)
    starts = [0, *(ends + 1)]
    return [tokenizer.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=False) if end > start]


def tear(texts: Sequence[str], count: int, seed: int) -> Torn:
    """Take the second half off `count` sentences of 16 to 40 words, drawn evenly from all that stand in the texts once.

    Raises UserError where there are not so many.
    """
    found = [
        (number, match.start(), match.group())
        for number, text in enumerate(texts)
        for match in SENTENCE.finditer(text)
        if len(match.group().split()) in WORDS and text.count(match.group()) == 1
    ]
    if len(found) < count:
        raise UserError(f"eval.prompts={count}: the split has only {len(found)} sentences of 16 to 40 words")
    chosen = np.random.default_rng(seed).choice(len(found), count, replace=False)
    kept: list[list[str]] = [[] for _ in texts]
    at = [0] * len(texts)
    queries, first = [], []
    for number, start, sentence in sorted(found[n] for n in chosen):
        words = list(re.finditer(r"\S+", sentence))
        cut = words[len(words) // 2].start()
        text = texts[number]
        before = text[at[number] : start]
        kept[number] += [before, sentence[:cut]]
        so_far = sum(len(part.encode()) for part in kept[number])
        first.append((number, so_far - len(sentence[:cut].encode()), so_far))
        queries.append(sentence[cut:])
        at[number] = start + len(sentence)
    torn = ["".join([*kept[number], text[at[number] :]]) for number, text in enumerate(texts)]
    return Torn([(str(number), text) for number, text in enumerate(torn)], queries, first)


def evaluate_half_sentences(
    model: Any,
    streams: dict[str, Stream],
    tokenizer: Tokenizer,
    config: Any,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Recall of `eval.prompts` torn sentences of a split, as `eval.retriever` ranks its blocks.

    streams: of the split `eval.split`, and for the landmarks also validation, on which the heads are chosen that are
    asked: the best by the geometric mean of their ranks, as many of them as together have the lowest.

    Returns recall_at_1, recall_at_10, their 95 % intervals recall_at_…_interval (Clopper–Pearson; none for chance),
    prompts, ranks (of the first block that counts, from 1), blocks, heads (where they are asked), tokens, seconds,
    tokens_per_second, peak_memory_bytes. Raises UserError where a split has too few sentences.
    """
    reset_peak_memory()
    started = time.perf_counter()
    settings = config.eval
    torn = tear(documents(streams[settings.split], tokenizer), settings.prompts, config.seed)
    pieces = [cut(*document, tokenizer, model.config.block_size)[0] for document in torn.documents]
    gold = _gold(torn, pieces)
    count = sum(map(len, pieces))
    results: dict[str, Any] = {"prompts": len(gold), "blocks": count, "heads": None}
    if settings.retriever == "chance":
        results |= {f"recall_at_{n}": float(np.mean([_chance(count, len(g), n) for g in gold])) for n in AT}
    else:
        if settings.retriever == "landmark":
            results["heads"] = _choose(model, streams["validation"], tokenizer, config, progress)
            score = _indexed(model, tokenizer, torn, results["heads"]).scores
        else:
            score = _bm25([block.text for blocks in pieces for block in blocks])
        ranks = [_rank(score(query), blocks) for query, blocks in zip(torn.queries, gold, strict=True)]
        results["ranks"] = ranks
        for n in AT:
            hits = sum(rank <= n for rank in ranks)
            results[f"recall_at_{n}"] = hits / len(ranks)
            results[f"recall_at_{n}_interval"] = list(clopper_pearson(hits, len(ranks)))
    seconds = time.perf_counter() - started
    tokens = len(streams[settings.split])
    return results | {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _indexed(model: Any, tokenizer: Tokenizer, torn: Torn, heads: Any = None) -> Retriever:
    retriever = Retriever(model, tokenizer, heads)
    retriever.index(torn.documents)
    return retriever


def _gold(torn: Torn, pieces: list[list[Block]]) -> list[list[int]]:
    """Numbers of the blocks, among those of all documents, that hold some of each first half."""
    before = np.cumsum([0, *map(len, pieces)])
    starts = [np.array([block.start for block in blocks]) for blocks in pieces]
    found = []
    for number, start, stop in torn.first:
        low, high = np.searchsorted(starts[number], [start, stop - 1], side="right") - 1
        found.append(list(range(before[number] + low, before[number] + high + 1)))
    return found


def _choose(
    model: Any, stream: Stream, tokenizer: Tokenizer, config: Any, progress: Callable[[int, int], None] | None
) -> list[list[int]]:
    """Heads, (layer, head): the best of a split by the geometric mean of their ranks, as many as together have the
    lowest."""
    torn = tear(documents(stream, tokenizer), config.eval.prompts, config.seed)
    gold = _gold(torn, [cut(*document, tokenizer, model.config.block_size)[0] for document in torn.documents])
    retriever = _indexed(model, tokenizer, torn)
    alone: dict[tuple[int, int], float] = {}
    total = 2 * len(gold)
    for number, (query, blocks) in enumerate(zip(torn.queries, gold, strict=True)):
        for head, scores in retriever.head_scores(query).items():
            alone[head] = alone.get(head, 0.0) + math.log(_rank(scores, blocks))
        if progress is not None:
            progress(number, total)
    order = sorted(alone, key=lambda head: alone[head])
    together = np.zeros(len(order))
    for number, (query, blocks) in enumerate(zip(torn.queries, gold, strict=True), len(gold)):
        of_heads = retriever.head_scores(query)
        sums = torch.stack([of_heads[head] for head in order]).cumsum(0)
        together += [math.log(_rank(scores, blocks)) for scores in sums]
        if progress is not None:
            progress(number, total)
    return [list(head) for head in order[: int(together.argmin()) + 1]]


def _rank(scores: Tensor, blocks: list[int]) -> int:
    """Rank of the best of some blocks, from 1; those with the same score stand before it."""
    others = torch.ones(len(scores), dtype=torch.bool)
    others[blocks] = False
    return 1 + int((scores[others] >= scores[blocks].max()).sum())


def _bm25(texts: list[str]) -> Callable[[str], Tensor]:
    import bm25s

    settings: dict[str, Any] = {"stopwords": "en", "show_progress": False}
    ranker = bm25s.BM25()
    ranker.index(bm25s.tokenize(texts, **settings), show_progress=False)

    def score(text: str) -> Tensor:
        words: Any = bm25s.tokenize([text], return_ids=False, **settings)[0]
        return torch.from_numpy(ranker.get_scores(words))

    return score


def _chance(blocks: int, gold: int, count: int) -> float:
    """That one of `gold` is among `count` drawn of all blocks."""
    return 1 - math.comb(blocks - gold, count) / math.comb(blocks, count)
