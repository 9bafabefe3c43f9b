"""Where blocks of different lengths end: at the ends of sentences or lines, and of documents.

A block has W = ℓ+1 places, the last for its landmark. It closes after ℓ tokens, or early: at a token that ends a
sentence, if it then has at least `least` tokens, and at end of text in any case. Its other places stay empty. With
ℓ = 4, least = 2, landmarks L, end of text E and empty places `·`::

    raw tokens    a b c . d e f g h . E i .
    places        a b c . L d e f g L h . · · L E · · · L i . · · L

Tokens are so at the first places of a block, and positions count places. Whether a block closes depends on its own
tokens alone, so a text is cut in the same way at once, in chunks and token by token. Loads no torch.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from landmark.utils.block_ends import BlockEnds

PIECE = 1 << 20  # tokens of a stream that are looked at together


def closed_blocks(
    tokens: np.ndarray, ends: BlockEnds, filled: int = 0, progress: Callable[[int, int], None] | None = None
) -> np.ndarray:
    """For each block that closes in a text the number of tokens read up to there, rising, int64.

    Args:
        tokens: (n,) ids.
        ends: the rule.
        filled: tokens of the first block before the text.
        progress: is called with the tokens done and n.
    """
    found = array("q")
    start = -filled
    for first in range(0, len(tokens), PIECE):
        piece = tokens[first : first + PIECE + ends.block_size]
        sentences, documents = (
            [*(np.flatnonzero(np.isin(piece, ids)) + first).tolist(), math.inf]
            for ids in (ends.ends, [ends.document_end])
        )
        while start < min(first + PIECE, len(tokens)):
            sentence = sentences[bisect_left(sentences, max(start + ends.least - 1, 0))]
            document = documents[bisect_left(documents, max(start, 0))]
            stop = min(start + ends.block_size, sentence + 1, document + 1)
            if stop > len(tokens):
                break
            start = int(stop)
            found.append(start)
        if progress is not None:
            progress(min(first + PIECE, len(tokens)), len(tokens))
    return np.frombuffer(found, dtype=np.int64)


def places_of_tokens(closed: np.ndarray, count: int, width: int, filled: int = 0) -> tuple[np.ndarray, int]:
    """The place of each token of a text, counted from its first, and the number of its places.

    Args:
        closed: of the text, as `closed_blocks` returns them.
        count: n, its tokens.
        width: W, places of a block.
        filled: tokens of the first block before the text.
    """
    starts = np.concatenate([[-filled], closed])
    token = np.arange(count)
    block = np.searchsorted(closed, token, side="right")
    places = block * width + token - starts[block] - filled
    return places, len(closed) * width + count - int(starts[-1]) - filled


def block_starts(tokens: np.ndarray, ends: BlockEnds, progress: Callable[[int, int], None] | None = None) -> np.ndarray:
    """The first token of each block of a stream, and at last the number of its tokens; args as for `closed_blocks`."""
    return np.concatenate([[0], closed_blocks(tokens, ends, progress=progress), [len(tokens)]])


class BlockPlaces:
    """The places of a whole stream, to find the token at each."""

    def __init__(self, starts: np.ndarray, width: int):
        """starts: as `block_starts` returns them. width: W, places of a block."""
        self._starts, self._width = np.asarray(starts), width
        count, blocks = int(starts[-1]), len(starts) - 2
        in_last = count - int(starts[-2])
        if blocks and in_last == 0:  # the places behind the last token are left out
            in_last = count - int(starts[-3]) - width
        self.num_places = blocks * width + in_last
        """Places up to the last token."""

    def tokens(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each place its token (at others the next one), whether it is a landmark's, and whether it is empty."""
        block, offset = np.divmod(places, self._width)
        start, stop = self._starts[block], self._starts[block + 1]
        is_landmark = offset == self._width - 1
        token = np.minimum(start + offset, stop)
        return token, is_landmark, (token == stop) & ~is_landmark
