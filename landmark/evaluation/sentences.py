"""A test of retrieval by landmarks: where in some books does a sentence stand?

A query is the second half of a sentence, which is removed from its book, and the blocks that hold the first half are to
be found; or a whole sentence, as it stands there or altered, and its blocks are to be found. For comparison BM25 and
chance rank the same blocks.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from landmark.data.document_blocks import Block, split_into_blocks
from landmark.retriever import SCORERS, Retriever
from landmark.utils.errors import UserError
from landmark.utils.peak_memory import peak_memory_bytes, reset_peak_memory
from landmark.utils.significance import clopper_pearson

if TYPE_CHECKING:
    from landmark.config import Config
    from landmark.data.stream import Stream
    from landmark.data.tokenizer import Tokenizer

SENTENCE = re.compile(r"(?<=[.!?]\s)[A-Z][^.!?]*[.!?]")
WORDS = range(16, 41)  # of a sentence that may be a query
LEFT_OUT = 3  # of an altered sentence every third word
AT = 1, 10  # ranks up to which a found block counts


@dataclass(frozen=True)
class SentenceQueries:
    """Documents (name, text) and sentences to find in them.

    queries: texts. places: for each query the number of its document, and the first and the last character (exclusive)
    of what is to be found: the sentence, or its first half where the second one, the query, is removed.
    """

    documents: list[tuple[str, str]]
    queries: list[str]
    places: list[tuple[int, int, int]]


def document_texts(stream: Stream, tokenizer: Tokenizer) -> list[str]:
    """The texts of a stream."""
    tokens = np.asarray(stream.tokens)
    ends = np.flatnonzero(tokens == tokenizer.eot)
    starts = [0, *(ends + 1)]
    return [tokenizer.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=False) if end > start]


def sentence_queries(texts: Sequence[str], count: int, seed: int, query: str = "second_half") -> SentenceQueries:
    """Ask for `count` random sentences of 16 to 40 words that occur once in their text.

    Args:
        texts: of the documents.
        count: of queries.
        seed: of the random choice; each kind of query asks for the same sentences.
        query: "second_half", which is removed from the document; "sentence"; or "altered": as one may remember it, its
            second half before its first one, without every third word.

    Raises UserError if there are fewer such sentences.
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
    queries, places = [], []
    for number, start, sentence in sorted(found[n] for n in chosen):
        words = list(re.finditer(r"\S+", sentence))
        cut = words[len(words) // 2].start()
        first, second = sentence[:cut], sentence[cut:]
        stays = first if query == "second_half" else sentence
        kept[number] += [texts[number][at[number] : start], stays]
        so_far = sum(map(len, kept[number]))
        places.append((number, so_far - len(stays), so_far))
        asked = {"second_half": second, "sentence": sentence, "altered": _altered(first, second)}
        queries.append(asked[query])
        at[number] = start + len(sentence)
    left = ["".join([*kept[number], text[at[number] :]]) for number, text in enumerate(texts)]
    return SentenceQueries([(str(number), text) for number, text in enumerate(left)], queries, places)


def _altered(first: str, second: str) -> str:
    words = f"{second} {first}".split()
    return " ".join(word for number, word in enumerate(words, 1) if number % LEFT_OUT)


def evaluate_sentences(
    model: Any,
    streams: dict[str, Stream],
    tokenizer: Tokenizer,
    config: Config,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Recall of `eval.prompts` sentences in a split, whose blocks `eval.retriever` ranks for queries `eval.query`.

    Landmarks, or tokens, are scored by the heads that find the places best on the validation split, see
    `_choose_heads`.

    Args:
        model: a landmark model.
        streams: the split `eval.split`, and for a model's scores also `validation`.
        tokenizer: of the streams.
        config: the row's settings.
        progress: called with queries done, of the validation split first, and in all.

    Returns:
        recall_at_1, recall_at_10, and recall_at_…_interval (Clopper–Pearson, 95 %; none for chance); prompts; ranks
        (of the first block that counts, from 1); blocks; heads (of the model); tokens, seconds, tokens_per_second,
        peak_memory_bytes.

    Raises UserError if a split has too few sentences.
    """
    reset_peak_memory()
    started = time.perf_counter()
    settings = config.eval
    asked, blocks, wanted = _asked_blocks(streams[settings.split], tokenizer, config, model.config.block_size)
    count = len(blocks)
    results: dict[str, Any] = {"prompts": len(wanted), "blocks": count, "heads": None}
    if settings.retriever == "chance":
        results |= {f"recall_at_{n}": float(np.mean([_chance(count, len(each), n) for each in wanted])) for n in AT}
    else:
        if settings.retriever in SCORERS:
            results["heads"] = _choose_heads(model, streams["validation"], tokenizer, config, progress)
            score = _indexed(model, tokenizer, asked, settings.retriever, results["heads"]).scores
        else:
            score = _bm25([block.text for block in blocks])
        ranks = []
        for query, right in zip(asked.queries, wanted, strict=True):
            ranks.append(_rank(score(query), right))
            if progress is not None:
                progress(len(wanted) + len(ranks), 2 * len(wanted))
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


def _indexed(model: Any, tokenizer: Tokenizer, asked: SentenceQueries, scorer: str, heads: Any = None) -> Retriever:
    retriever = Retriever(model, tokenizer, heads, scorer)
    retriever.index(asked.documents)
    return retriever


def _asked_blocks(
    stream: Stream, tokenizer: Tokenizer, config: Config, block_size: int
) -> tuple[SentenceQueries, list[Block], list[list[int]]]:
    """What is asked of a split, its blocks, and for each query the blocks with a part of what is to be found."""
    texts = document_texts(stream, tokenizer)
    asked = sentence_queries(texts, config.eval.prompts, config.seed, config.eval.query)
    pieces = [split_into_blocks(*document, tokenizer, block_size)[0] for document in asked.documents]
    before = np.cumsum([0, *map(len, pieces)])
    starts = [np.array([block.start for block in blocks]) for blocks in pieces]
    found = []
    for number, start, stop in asked.places:
        low, high = np.searchsorted(starts[number], [start, stop - 1], side="right") - 1
        found.append(list(range(before[number] + low, before[number] + high + 1)))
    return asked, [block for blocks in pieces for block in blocks], found


def _choose_heads(
    model: Any, stream: Stream, tokenizer: Tokenizer, config: Config, progress: Callable[[int, int], None] | None
) -> list[list[int]]:
    """The heads (layer, head) whose summed scores rank the wanted blocks best on a split.

    1. Order the heads by the geometric mean of the ranks that each head alone gives to the wanted blocks.
    2. For every n sum the scores of the first n heads. Choose the n with the lowest geometric mean of ranks.
    """
    asked, _, wanted = _asked_blocks(stream, tokenizer, config, model.config.block_size)
    assert config.eval.retriever is not None
    retriever = _indexed(model, tokenizer, asked, config.eval.retriever)
    found: list[dict[tuple[int, int], Tensor]] = []
    for number, query in enumerate(asked.queries):
        found.append(retriever.head_scores(query))
        if progress is not None:
            progress(number, 2 * len(wanted))
    del retriever  # another index is made next

    def distance(scores: Iterable[Tensor]) -> float:
        return sum(math.log(_rank(each, blocks)) for each, blocks in zip(scores, wanted, strict=True))

    order = sorted(found[0], key=lambda head: distance(scores[head] for scores in found))
    sums = [torch.stack([scores[head] for head in order]).cumsum(0) for scores in found]
    together = np.array([distance(each[n] for each in sums) for n in range(len(order))])
    return [list(head) for head in order[: int(together.argmin()) + 1]]


def _rank(scores: Tensor, blocks: list[int]) -> int:
    """The rank, from 1, of the best of some blocks; other blocks with the same score rank higher."""
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


def _chance(blocks: int, wanted: int, count: int) -> float:
    """The probability that `count` blocks drawn at random contain one of `wanted` blocks."""
    return 1 - math.comb(blocks - wanted, count) / math.comb(blocks, count)
