"""Sentences of a split that are asked for, and the blocks of its documents that hold them. Loads no torch."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from landmark.data.stream import Stream
from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.config import Config

SENTENCE = re.compile(r"(?<=[.!?]\s)[A-Z][^.!?]*[.!?]")
WORDS = range(16, 41)  # of a sentence that may be a query
LEFT_OUT = 3  # of an altered sentence every third word


class SentenceQueries(NamedTuple):
    """Texts, and queries for places in them: the number of a text, and the first and last character (exclusive)."""

    texts: list[str]
    queries: list[str]
    places: list[tuple[int, int, int]]


class AskedBlocks(NamedTuple):
    """Documents in blocks of ℓ tokens, and queries for some of them.

    ids: of each document, (blocks · ℓ,) int64, padded with end of text. texts: of all blocks; a character whose bytes
    are in several blocks belongs to the last of them. wanted: for each query the numbers of the blocks that count.
    """

    ids: list[np.ndarray]
    texts: list[str]
    queries: list[str]
    wanted: list[list[int]]


def document_texts(stream: Stream, tokenizer: Tokenizer) -> list[str]:
    """The texts of a stream."""
    tokens = np.asarray(stream.tokens)
    ends = np.flatnonzero(tokens == tokenizer.eot)
    starts = [0, *(ends + 1)]
    return [tokenizer.decode(tokens[start:end]) for start, end in zip(starts, ends, strict=False) if end > start]


def sentence_queries(texts: Sequence[str], count: int, seed: int, query: str = "second_half") -> SentenceQueries:
    """Ask for `count` random sentences of 16 to 40 words that occur once in their text, whatever `query` is.

    query: "second_half", which is removed from its text, so that the first half is to be found; "sentence"; or
    "altered": its second half before its first one, without every third word. Raises UserError for too few sentences.
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
    left, removed, queries, places = list(texts), [0] * len(texts), [], []
    for number, start, sentence in sorted(found[n] for n in chosen):
        words = list(re.finditer(r"\S+", sentence))
        half = words[len(words) // 2].start()
        first, second = sentence[:half], sentence[half:]
        start -= removed[number]
        stays = len(sentence)
        if query == "second_half":
            stays = half
            left[number] = left[number][: start + half] + left[number][start + len(sentence) :]
            removed[number] += len(second)
        altered = " ".join(word for place, word in enumerate(f"{second} {first}".split(), 1) if place % LEFT_OUT)
        queries.append({"second_half": second, "sentence": sentence, "altered": altered}[query])
        places.append((number, start, start + stays))
    return SentenceQueries(left, queries, places)


def asked_blocks(stream: Stream, tokenizer: Tokenizer, config: "Config", block_size: int) -> AskedBlocks:
    """The blocks of a stream, and what `eval.prompts` and `eval.query` ask of them."""
    settings = config.eval
    asked = sentence_queries(document_texts(stream, tokenizer), settings.prompts, config.seed, settings.query)
    documents = [split_into_blocks(text, tokenizer, block_size) for text in asked.texts]
    before = np.cumsum([0, *(len(blocks) for blocks, _ in documents)])
    starts = [np.cumsum([0, *map(len, blocks[:-1])]) for blocks, _ in documents]
    wanted = []
    for number, start, stop in asked.places:
        low, high = before[number] + np.searchsorted(starts[number], [start, stop - 1], "right") - 1
        wanted.append(list(range(low, high + 1)))
    texts = [text for blocks, _ in documents for text in blocks]
    return AskedBlocks([ids for _, ids in documents], texts, asked.queries, wanted)


def split_into_blocks(text: str, tokenizer: Tokenizer, block_size: int) -> tuple[list[str], np.ndarray]:
    """The texts of a document's blocks, and its ids (blocks · ℓ,) int64, padded with end of text."""
    ids, ends = tokenizer.encode_with_ends(text)
    characters = np.cumsum([len(character.encode()) for character in text])  # the byte at which each ends
    cuts = [0, *np.searchsorted(characters, ends[block_size - 1 : -1 : block_size], "right"), len(text)]
    padded = np.pad(ids.astype(np.int64), (0, -len(ids) % block_size), constant_values=tokenizer.eot)
    return [text[start:stop] for start, stop in pairwise(cuts)], padded
