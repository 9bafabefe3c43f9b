"""The passages of a text behind an answer: found by the question's attention and by its words."""

from __future__ import annotations

import logging
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from landmark.documents import Document, as_files
from landmark.memory.blocks.cache import BlockCache
from landmark.memory.blocks.shares import AttentionProbe
from landmark.reading.answer import Decode, Decoding
from landmark.reading.answering import Answering, finished
from landmark.utils.errors import UserError

NULL = "N/A"  # the question that asks nothing: what it attends to, every question does
WORDS = 0.25  # what BM25 counts of a score; this and the next were chosen in experiments/sources
JOINED = 0.2  # of a passage's best block, that a neighbour must have to be a part of it
LONGEST = 400  # characters by which a passage is extended to the ends of sentences
FOUND = 3  # passages, where no number is given
HEAD = 300  # characters of a text's beginning that an answer from passages has too, and more up to a sentence's end
WHOLE = 4000  # most characters of a whole text that is written out in place of passages
_SPACE = re.compile(r"\s+")
_END = re.compile(r"(?<!\b[A-Z])(?<!\b[DMS][rst])(?<!\bMrs)[.!?…][\"'”’»)\]]*\s+|[。！？]|\n\s*\n\s*")


class Source(NamedTuple):
    """A part of a text. text: characters `start` to `end` of a document's file. share: of what all its blocks have
    together. kind: "passage", "head" (the beginning, which an answer from passages has beside them) or "whole" (the
    whole text, as no passage was found).
    """

    text: str
    place: str
    document: str
    start: int
    end: int
    share: float
    kind: str = "passage"


class Found(NamedTuple):
    """What was found for a question. sources: the best passages first, heads last. text: of all of them in the order of
    the documents, for an answer from them alone; empty: the whole text is to be read. question: what was asked.
    words: BM25 of the block that is the best for it.
    """

    sources: list[Source]
    text: str = ""
    question: str = ""
    words: float = 0.0


class Scores(NamedTuple):
    """Of each block. bounds: characters of `text` where the blocks begin and, last, where the last of them ends. asked,
    null: (layers, H, blocks), the shares of attention of the question and of NULL. words: (blocks,), of BM25 for the
    question.
    """

    text: str
    bounds: list[int]
    documents: list[tuple[int, Document]]
    asked: np.ndarray
    null: np.ndarray
    words: np.ndarray
    question: str


def check_sources(model: Any) -> None:
    """Raise UserError for a model whose blocks have no scores of all keys."""
    landmarks = getattr(model, "landmarks", None)
    if landmarks is None or landmarks.token is not None:
        raise UserError("sources: only a model of transformers that reads without landmarks finds its sources")


def find(
    answering: Answering,
    cache: Any,
    documents: Sequence[tuple[int, Document]],
    read: Sequence[int],
    prompt: Sequence[int],
    null: Sequence[int],
    most: int,
    alone: bool = False,
    gone: threading.Event | None = None,
) -> Found:
    """At most `most` passages (0: FOUND) of what was read that are behind an answer, or that it is made of (`alone`).

    1. A copy of the memory reads the question once more, and another one reads NULL. The shares of attention that each
       block gets with NULL are taken off those with the question; a mean over layers and heads.
    2. BM25 ranks the blocks by the question's words. It is WORDS of a score, the attention is the rest.
    3. The best blocks, joined with neighbours that have JOINED of it, and cut at sentences, are the passages, sorted by
       the share of all their blocks.
    4. An answer that is made from them alone also has the beginning of each of their documents, where title, author and
       parties stand; if there is no passage, the whole text.

    Args:
        cache: the memory that has read these documents, and perhaps answered.
        documents: the texts that were read before the prompt, each with the character at which it begins in the text of
            the tokens.
        read: ids of these.
        prompt: ids behind them, up to the answer.
        null: the same with NULL in place of the question.

    Raises Gone as `Answering.read`.
    """
    if (scores := scores_of(answering, cache, documents, read, prompt, null, gone)) is None:
        text, files, _ = as_files(answering.chats.decode(read), documents)
        return Found(_whole_texts(files)) if alone else Found([])
    text, files = scores.text, scores.documents
    score = combined(scores.asked, scores.null, scores.words)
    for block, (start, end) in enumerate(pairwise(scores.bounds)):
        score[block] *= any(begin < end and start < begin + len(document.text) for begin, document in files)
    ends = ends_of(text)
    spans = passages(text, scores.bounds, score, most or FOUND, ends)
    numbered = [each for span in spans if (each := _source(text, files, *span))[1].text]
    numbered.sort(key=lambda each: -each[1].share)
    if not alone:
        return Found([each for _, each in numbered])
    if not numbered:
        return Found(_whole_texts(files))
    for number in sorted({number for number, _ in numbered}):
        own = [each.start for at, each in numbered if at == number]
        if (head := _head(text, ends, *files[number], own)).text:
            numbered.append((number, head))
    ordered = sorted(numbered, key=lambda each: (each[0], each[1].start))
    whole = "".join(f"{each.text}\n\n" for _, each in ordered)
    return Found([each for _, each in numbered], whole, scores.question, float(scores.words.max()))


def _head(text: str, ends: Sequence[int], begin: int, document: Document, passages: Sequence[int]) -> Source:
    """The beginning of a document, up to where its first passage begins. passages: the places where they begin."""
    _, stop = _whole(text, ends, begin, begin + min(HEAD, len(document.text)))
    head = document.text[: min(stop - begin, *passages)]
    start, end = len(head) - len(head.lstrip()), len(head.rstrip())
    return Source(head.strip(), document.place(start), document.name, start, end, 0, "head")


def _whole_texts(documents: Sequence[tuple[int, Document]]) -> list[Source]:
    """The documents in place of passages. A text that is longer than WHOLE is not written out."""
    found = list[Source]()
    for _, document in documents:
        text = document.text if len(document.text) <= WHOLE else ""
        found.append(Source(text, "the whole text", document.name, 0, len(document.text), 1, "whole"))
    return found


def scores_of(
    answering: Answering,
    cache: Any,
    documents: Sequence[tuple[int, Document]],
    read: Sequence[int],
    prompt: Sequence[int],
    null: Sequence[int],
    gone: threading.Event | None = None,
) -> Scores | None:
    """As of `find`; None where nothing was asked, or the text has no whole block."""
    size, count = cache.memory.block_size, len(read)
    prompts, shares = [[*read, *prompt], [*read, *null]], list[np.ndarray]()
    for ids, other in (prompts, prompts[::-1]):
        if not (asking := differing(ids, other)) or count < size:
            return None
        mark = cache.mark_before(asking.start)
        assert mark is not None or not cache.ends
        fork = answering.new_memory() if mark is None else cache.fork(mark)
        watched: Any = AttentionProbe(cast(BlockCache, fork.memory), count // size, asking, cache.starts)
        fork.marks, fork.memory = None, watched
        finished(answering.read(torch.tensor([ids[fork.get_seq_length() : asking.stop]]), fork, gone))
        shares.append(watched.shares().numpy())
        del fork, watched  # before the next copy is made
    question = answering.chats.decode([prompts[0][at] for at in differing(*prompts)])
    decoded, bounds = text_of(answering.chats.decode, read, size)
    text, files, place = as_files(decoded, documents)
    bounds = [place(at) for at in bounds]
    by_words = words([text[start:end] for start, end in pairwise(bounds)], question)
    return Scores(text, bounds, files, shares[0], shares[1], by_words, question)


def differing(ids: Sequence[int], other: Sequence[int]) -> range:
    """The places of the ids between the beginning and the end that both have."""
    same = next((at for at, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
    behind = zip(reversed(ids[same:]), reversed(other[same:]), strict=False)
    return range(same, len(ids) - next((at for at, (a, b) in enumerate(behind) if a != b), 0))


def combined(asked: np.ndarray, null: np.ndarray, by_words: np.ndarray) -> np.ndarray:
    """The scores (blocks,), from 0. asked, null: (layers, H, blocks), shares of attention. by_words: (blocks,)."""
    more = np.maximum(0, (asked - null).mean((0, 1)))
    return (1 - WORDS) * more / max(more.sum(), 1e-9) + WORDS * by_words / max(by_words.sum(), 1e-9)


def words(texts: Sequence[str], query: str) -> np.ndarray:
    """The scores (texts,) of BM25 for the words of a query, without English stop words."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    tokenize: Any = bm25s.tokenize
    cut = partial(tokenize, stopwords="en", show_progress=False, return_ids=False)
    cut_texts, wanted = cut([*texts]), cut([query])[0]
    ranker = bm25s.BM25()
    if not wanted or not any(cut_texts):
        return np.zeros(len(texts), np.float32)
    ranker.index(cut_texts, show_progress=False)
    return ranker.get_scores(wanted)


def text_of(decode: Decode, ids: Sequence[int], size: int) -> tuple[str, list[int]]:
    """The text of ids, and the characters where its whole blocks begin and, last, where the last of them ends."""
    read = list[int]()
    decoding, bounds = Decoding(decode, read), [0]
    for start in range(0, len(ids), size):
        read += ids[start : start + size]
        bounds.append(len(decoding.text(whole=False)))
    return decoding.text(whole=True), bounds[: len(ids) // size + 1]


def passages(
    text: str, bounds: Sequence[int], score: np.ndarray, most: int, ends: Sequence[int] = ()
) -> list[tuple[int, int, float]]:
    """First character, the one behind the last, and share of the best passages. score: of each block, at least 0. ends:
    of sentences, if they are known.
    """
    found: list[list[int]] = []  # blocks: first, last, best
    for block in np.argsort(-score, kind="stable").tolist():
        near = [each for each in found if each[0] - 1 <= block <= each[1] + 1]
        if near:
            if score[block] >= JOINED * score[near[0][2]]:
                near[0][0], near[0][1] = min(near[0][0], block), max(near[0][1], block)
        elif score[block] > 0 and len(found) < most:
            found.append([block, block, block])
    ends = ends or ends_of(text)
    shares, spans = score / max(score.sum(), 1e-9), list[tuple[int, int, float]]()
    for first, last, _ in found:
        start, end = _whole(text, ends, bounds[first], bounds[last + 1])
        share = float(shares[first : last + 1].sum())
        same = next((each for each in spans if each[0] < end and start < each[1]), None)  # a long sentence of both
        if same is None:
            spans.append((start, end, share))
        else:
            spans[spans.index(same)] = min(start, same[0]), max(end, same[1]), share + same[2]
    return spans


def ends_of(text: str) -> list[int]:
    """The places where sentences end, and the first one."""
    return [0, *(each.end() for each in _END.finditer(text)), len(text)]


def _whole(text: str, ends: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """The sentences that are for the greater part between two characters; of long ones, whole words."""
    if start >= end:  # a block of special tokens
        return start, end
    own = [*pairwise(ends[bisect_right(ends, start) - 1 : bisect_left(ends, end) + 1])]
    own = [(a, b) for a, b in own if 2 * (min(b, end) - max(a, start)) >= min(b - a, end - start)] or own
    first, last = own[0][0], own[-1][1]
    if first < start - LONGEST:
        first = next((each.end() for each in _SPACE.finditer(text, start - LONGEST, start)), start)
    if last > end + LONGEST:
        last = max((each.start() for each in _SPACE.finditer(text, end, end + LONGEST)), default=end)
    return first, last


def _source(
    text: str, documents: Sequence[tuple[int, Document]], start: int, end: int, share: float
) -> tuple[int, Source]:
    """The part of a passage that is in the document of which it has most, without space at its ends, and the number of
    that document.
    """
    clipped = [(max(start, at), min(end, at + len(each.text)), number) for number, (at, each) in enumerate(documents)]
    start, end, number = max(clipped, key=lambda each: (each[1] - each[0], -each[2]))
    at, document = documents[number]
    passage = text[start:end]
    start, end = start + len(passage) - len(passage.lstrip()), start + len(passage.rstrip())
    place = document.place(start - at)
    return number, Source(text[start:end], place, document.name, start - at, end - at, round(share, 4))
