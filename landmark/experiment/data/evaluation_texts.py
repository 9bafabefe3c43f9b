"""What an evaluation reads of a split: segments, and stretches that come twice; and the bytes and words of a text.

The probe `eval.task=copy` measures whether a model looks back: a stretch of a split, then the same stretch again. The
tokens marked with ^ are counted, those marked with - for comparison::

    a b c d | a b c d
      - - -     ^ ^ ^

The first token of a copy is not counted: nothing tells that the stretch begins again. So both copies are of the same
tokens. By bytes and words, perplexities of different tokenizers compare. Loads no torch.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from landmark.experiment.data.stream import Stream
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.experiment.config.schema import EvalConfig

_SPACES = (chr(code).encode() for code in range(0x3001) if chr(code).isspace())  # what str.split() parts words by
_BETWEEN = re.compile(b"(?:%s)+" % b"|".join(map(re.escape, _SPACES)))
_REACH = 3  # bytes of the longest whitespace character: how far a byte's class can depend on its neighbours


@dataclass(frozen=True)
class Segment:
    """Tokens start … start+length−1 of the raw stream. The last `counted` predictions, of the next token, count."""

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

    Without a budget, as in the paper (Section 4.1), the whole stream is cut, a shorter rest dropped, every prediction
    counts. With `tokens` predictions, ⌊tokens / span⌋ (at least 1) evenly spaced spans are cut, the same for every
    length; where `length` does not divide `span`, the last segment is moved back, and only its new predictions count.
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


def copies(settings: "EvalConfig", stream: Stream) -> tuple[np.ndarray, list[int]]:
    """`eval.prompts` stretches of `eval.length` / 2 tokens, at even distances, each twice, (N, L) int64, and where each
    begins in the stream. Raises UserError if the split has too few tokens.
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
    return np.concatenate([once, once], axis=1), starts


def document_starts(tokens: np.ndarray, end: int, places: Sequence[int]) -> list[int]:
    """The first tokens of the documents in a stream (N,) in which these places are. end: id after each document."""
    starts = np.concatenate([[0], np.flatnonzero(tokens == end) + 1])
    return np.unique(starts[np.searchsorted(starts, places, side="right") - 1]).tolist()


@dataclass(frozen=True)
class TextSize:
    """Size of a text: UTF-8 bytes, and words, which are parted by whitespace."""

    num_bytes: int
    words: int


def word_starts(text: bytes) -> list[int]:
    """The bytes of UTF-8 text at which words begin, as many as len(text.decode().split())."""
    starts = [*([] if _BETWEEN.match(text) else [0]), *(space.end() for space in _BETWEEN.finditer(text))]
    return [start for start in starts if start < len(text)]


def text_size(tokens: np.ndarray, ranges: Iterable[tuple[int, int]], tokenizer: Tokenizer) -> TextSize:
    """Bytes and words of the text of token ranges [start, stop) of a stream (N,). A word belongs to the range of its
    first byte, so the sizes of adjacent ranges add up. End of text has no bytes and parts words.
    """
    total_bytes = total_words = 0
    for start, stop in ranges:
        if not 0 <= start <= stop <= len(tokens):
            raise ValueError(f"token range {start}..{stop} is not inside a stream of {len(tokens)} tokens")
        body_ids = np.asarray(tokens[start:stop])
        total_bytes += int(tokenizer.byte_lengths[body_ids].sum())
        body = tokenizer.decode_bytes(body_ids, special=b" ")
        before = tokenizer.decode_bytes(tokens[max(0, start - _REACH) : start], special=b" ")
        after = tokenizer.decode_bytes(tokens[stop : stop + _REACH], special=b" ")
        total_words += sum(0 <= at - len(before) < len(body) for at in word_starts(before + body + after))
    return TextSize(total_bytes, total_words)
