"""What an evaluation reads of a split: segments, probes, and sentences that are asked for. Loads no torch.

Probes measure whether a model looks back. Copy: a stretch of a split, then the same stretch again. Recall: pairs of
random tokens, then the same pairs in another order. The marked tokens are counted, those marked with - for comparison::

    copy    a b c d | a b c d        recall    k v  l w  m x | l w  m x  k v
              - - -     ^ ^ ^                                    ^    ^    ^

The first token of a copy is not counted: nothing tells that the stretch begins again. So both copies are of the same
tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from landmark.data.random_numbers import sample_generator
from landmark.data.stream import Stream
from landmark.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.config.schema import Config, EvalConfig

SENTENCE = re.compile(r"(?<=[.!?]\s)[A-Z][^.!?]*[.!?]")
WORDS = range(16, 41)  # of a sentence that may be a query
LEFT_OUT = 3  # of an altered sentence every third word


@dataclass(frozen=True)
class Segment:
    """Tokens start … start+length−1 of the raw stream, of whose predictions the last `counted` count.

    The prediction at token p is of token p + 1, so the last target is token start + length.
    """

    start: int
    length: int
    counted: int

    @property
    def targets(self) -> tuple[int, int]:
        """Range [first, stop) of the tokens whose predictions count."""
        stop = self.start + self.length + 1
        return stop - self.counted, stop


def segments(stream_length: int, length: int, tokens: int | None = None, span: int = 4096) -> list[Segment]:
    """Cut a stream into segments, each of which is read with an empty memory.

    Without a budget, as in the paper (Section 4.1), the whole stream is cut, the shorter rest is dropped, and every
    prediction counts. With a budget of `tokens` predictions, ⌊tokens / span⌋ (at least 1) evenly spaced spans of `span`
    predictions are cut. They do not overlap and do not depend on `length`, so every length is measured on the same
    text. If `length` does not divide the span, the last segment is moved back, and only its new predictions count.

    Raises UserError for a length below 1 or above span, and for a length or span longer than the stream.
    """
    if length < 1:
        raise UserError(f"eval.length={length}: an evaluation segment needs at least 1 token")
    if length + 1 > stream_length:
        raise UserError(
            f"eval.length={length} is longer than the split, which has {stream_length} tokens "
            "(one more than the length is needed): lower eval.length or choose another eval.split"
        )
    predictions = stream_length - 1
    if tokens is None:
        return [Segment(number * length, length, length) for number in range(predictions // length)]
    if tokens < 1 or span < 1:
        raise UserError(f"eval.tokens={tokens} and eval.span={span} must be at least 1")
    if length > span:
        raise UserError(f"eval.length={length} is longer than eval.span={span}: raise eval.span to at least {length}")
    if span > predictions:
        raise UserError(
            f"eval.span={span} is longer than the split, which has {stream_length} tokens: lower eval.span "
            "or evaluate the whole split with eval.tokens=null"
        )
    count = min(max(1, tokens // span), predictions // span)
    starts = [number * predictions // count for number in range(count)]
    return [segment for start in starts for segment in _cut(start, span, length)]


def _cut(start: int, span: int, length: int) -> list[Segment]:
    whole, rest = divmod(span, length)
    cut = [Segment(start + number * length, length, length) for number in range(whole)]
    if rest:
        cut.append(Segment(start + span - length, length, rest))
    return cut


@dataclass(frozen=True)
class ProbeTexts:
    """The segments of a probe.

    tokens: (N, L) int64. starts: for each segment the place that its counted tokens have in a record's `segments`.
    counted: the positions of a segment's tokens that can be known by looking back. compared: positions of the same
    tokens when they come first; none for recall.
    """

    tokens: np.ndarray
    starts: list[int]
    counted: range
    compared: range


def probe_texts(settings: "EvalConfig", stream: Stream, tokenizer: Tokenizer) -> ProbeTexts:
    """The `eval.prompts` segments of `eval.length` tokens that a probe reads.

    Raises UserError if the split has too few tokens for copies, or the tokenizer too few for recall.
    """
    return _copies(settings, stream) if settings.probe == "copy" else _pairs(settings, tokenizer)


def _copies(settings: "EvalConfig", stream: Stream) -> ProbeTexts:
    """Stretches at even distances, which do not overlap."""
    half, count = settings.length // 2, settings.prompts
    room = (len(stream) - 1) // half
    if room < count:
        raise UserError(
            f"eval.prompts={count}: the {settings.split} split has {len(stream):,} tokens, that is {room} stretches "
            f"of {half:,} for eval.task=copy: lower eval.prompts or eval.length, or choose another eval.split"
        )
    starts = [segment.start for segment in segments(len(stream), half, count * half, half)]
    once = np.stack([stream.tokens[start : start + half] for start in starts]).astype(np.int64)
    return ProbeTexts(
        tokens=np.concatenate([once, once], axis=1),
        starts=[start + 1 for start in starts],
        counted=range(half + 1, 2 * half),
        compared=range(1, half),
    )


def _pairs(settings: "EvalConfig", tokenizer: Tokenizer) -> ProbeTexts:
    """Each segment is a function of the split, its length and its number. No token is in two pairs."""
    length, count = settings.length, settings.length // 4
    known = np.flatnonzero(tokenizer.byte_lengths)  # without special and unused ids
    if 2 * count > len(known):
        raise UserError(
            f"eval.length={length}: eval.task=recall needs {2 * count:,} different tokens, and "
            f"tokenizer={tokenizer.name} has {len(known):,}: lower eval.length to at most {len(known) // 2 * 4:,}"
        )
    texts = []
    for number in range(settings.prompts):
        draw = sample_generator(settings.split, length, number)
        pairs = draw.permutation(known)[: 2 * count].reshape(count, 2)
        texts.append(np.concatenate([pairs, draw.permutation(pairs)]).ravel())
    starts = [number * length for number in range(settings.prompts)]
    return ProbeTexts(np.stack(texts).astype(np.int64), starts, range(2 * count + 1, length, 2), range(0))


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
