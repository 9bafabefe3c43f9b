"""Texts of probes, which measure whether a model looks back. Loads no torch.

Copy: a stretch of a split, then the same stretch again. Recall: pairs of random tokens, then the same pairs in another
order. The marked tokens are counted, those marked with - for comparison:

    copy    a b c d | a b c d        recall    k v  l w  m x | l w  m x  k v
              - - -     ^ ^ ^                                    ^    ^    ^

The first token of a copy is not counted: nothing tells that the stretch begins again. So both copies are of the same
tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from landmark.data.random_numbers import sample_generator
from landmark.data.segments import segments
from landmark.data.stream import Stream
from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.config.schema import EvalConfig


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
    """The `eval.prompts` segments of `eval.length` tokens that `eval.probe` reads.

    Args:
        settings: the settings `eval` of a row.
        stream: the split `eval.split`.
        tokenizer: of the stream.

    Raises UserError if the split has too few tokens for copies, or the tokenizer too few for recall.
    """
    if settings.probe == "copy":
        return _copies(settings, stream)
    return _pairs(settings, tokenizer)


def _copies(settings: "EvalConfig", stream: Stream) -> ProbeTexts:
    """Stretches at even distances, which do not overlap."""
    half, count = settings.length // 2, settings.prompts
    room = (len(stream) - 1) // half
    if room < count:
        raise UserError(
            f"eval.prompts={count}: the {settings.split} split has {len(stream):,} tokens, that is {room} stretches "
            f"of {half:,} for eval.probe=copy: lower eval.prompts or eval.length, or choose another eval.split"
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
            f"eval.length={length}: eval.probe=recall needs {2 * count:,} different tokens, and "
            f"tokenizer={tokenizer.name} has {len(known):,}: lower eval.length to at most {len(known) // 2 * 4:,}"
        )
    texts = []
    for number in range(settings.prompts):
        draw = sample_generator(settings.split, length, number)
        pairs = draw.permutation(known)[: 2 * count].reshape(count, 2)
        texts.append(np.concatenate([pairs, draw.permutation(pairs)]).ravel())
    starts = [number * length for number in range(settings.prompts)]
    return ProbeTexts(np.stack(texts).astype(np.int64), starts, range(2 * count + 1, length, 2), range(0))
