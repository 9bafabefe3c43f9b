"""What an evaluation reads of a split: segments, stretches that come twice, and sentences that are asked for.

The probe `eval.task=copy` measures whether a model looks back: a stretch of a split, then the same stretch again. The
tokens marked with ^ are counted, those marked with - for comparison::

    a b c d | a b c d
      - - -     ^ ^ ^

The first token of a copy is not counted: nothing tells that the stretch begins again. So both copies are of the same
tokens. Loads no torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from landmark.data.stream import Stream
from landmark.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.config.schema import Config, EvalConfig

SENTENCE = re.compile(r"(?<=[.!?]\s)[A-Z][^.!?]*[.!?]")
WORDS = range(16, 41)  # of a sentence that may be a query


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

    Raises UserError for a length or span longer than the stream.
    """
    if length + 1 > stream_length:
        raise UserError(
            f"eval.length={length} is longer than the split, which has {stream_length} tokens "
            "(one more than the length is needed): lower eval.length or choose another eval.split"
        )
    predictions = stream_length - 1
    if tokens is None:
        return [Segment(number * length, length, length) for number in range(predictions // length)]
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
class Copies:
    """Stretches that come twice.

    tokens: (N, L) int64. starts: for each segment the place that its counted tokens have in a record's `segments`.
    counted: the positions of a segment's tokens that can be known by looking back. compared: positions of the same
    tokens when they come first.
    """

    tokens: np.ndarray
    starts: list[int]
    counted: range
    compared: range


def copies(settings: "EvalConfig", stream: Stream) -> Copies:
    """`eval.prompts` segments of `eval.length` tokens, at even distances, which do not overlap.

    Raises UserError if the split has too few tokens.
    """
    half, count = settings.length // 2, settings.prompts
    room = (len(stream) - 1) // half
    if room < count:
        raise UserError(
            f"eval.prompts={count}: the {settings.split} split has {len(stream):,} tokens, that is {room} stretches "
            f"of {half:,} for eval.task=copy: lower eval.prompts or eval.length, or choose another eval.split"
        )
    starts = [segment.start for segment in segments(len(stream), half, count * half, half)]
    once = np.stack([stream.tokens[start : start + half] for start in starts]).astype(np.int64)
    return Copies(
        tokens=np.concatenate([once, once], axis=1),
        starts=[start + 1 for start in starts],
        counted=range(half + 1, 2 * half),
        compared=range(1, half),
    )


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


def sentences(texts: Sequence[str], count: int, seed: int) -> list[tuple[int, int, str]]:
    """`count` random sentences of 16 to 40 words that occur once in their text: the text's number, place, sentence.

    Raises UserError for too few sentences.
    """
    found = [
        (number, match.start(), match.group())
        for number, text in enumerate(texts)
        for match in SENTENCE.finditer(text)
        if len(match.group().split()) in WORDS and text.count(match.group()) == 1
    ]
    if len(found) < count:
        raise UserError(f"eval.prompts={count}: the split has only {len(found)} sentences of 16 to 40 words")
    return sorted(found[n] for n in np.random.default_rng(seed).choice(len(found), count, replace=False))


def asked_blocks(stream: Stream, tokenizer: Tokenizer, config: "Config", block_size: int) -> AskedBlocks:
    """The blocks of a stream, and those that hold `eval.prompts` sentences, which are asked for."""
    texts = document_texts(stream, tokenizer)
    asked = sentences(texts, config.eval.prompts, config.seed)
    documents = [split_into_blocks(text, tokenizer, block_size) for text in texts]
    before = np.cumsum([0, *(len(blocks) for blocks, _ in documents)])
    starts = [np.cumsum([0, *map(len, blocks[:-1])]) for blocks, _ in documents]
    wanted = []
    for number, start, sentence in asked:
        last = start + len(sentence) - 1
        low, high = before[number] + np.searchsorted(starts[number], [start, last], "right") - 1
        wanted.append(list(range(low, high + 1)))
    of_blocks = [text for blocks, _ in documents for text in blocks]
    return AskedBlocks([ids for _, ids in documents], of_blocks, [sentence for *_, sentence in asked], wanted)


def split_into_blocks(text: str, tokenizer: Tokenizer, block_size: int) -> tuple[list[str], np.ndarray]:
    """The texts of a document's blocks, and its ids (blocks · ℓ,) int64, padded with end of text."""
    ids, ends = tokenizer.encode_with_ends(text)
    characters = np.cumsum([len(character.encode()) for character in text])  # the byte at which each ends
    cuts = [0, *np.searchsorted(characters, ends[block_size - 1 : -1 : block_size], "right"), len(text)]
    padded = np.pad(ids.astype(np.int64), (0, -len(ids) % block_size), constant_values=tokenizer.eot)
    return [text[start:stop] for start, stop in pairwise(cuts)], padded
