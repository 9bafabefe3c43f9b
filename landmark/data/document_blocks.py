"""Documents cut into blocks of ℓ tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Block:
    """Part of a document: `text` is its characters from `start` to `stop` (exclusive).

    A character whose bytes are in several blocks belongs to the last of them.
    """

    document: str
    start: int
    stop: int
    text: str


def split_into_blocks(name: str, text: str, tokenizer: Tokenizer, block_size: int) -> tuple[list[Block], np.ndarray]:
    """Split a document into blocks.

    Args:
        name: name of the document.
        text: text of the document.
        tokenizer: one of `landmark.data`.
        block_size: ℓ, normal tokens of a block.

    Returns the blocks and the ids (blocks · ℓ,), int64, padded with end of text. Raises UserError for a document
    that is no text, or an empty one.
    """
    content = encoded(name, text)
    ids, token_ends = tokenizer.encode_with_ends(text)
    ids = ids.astype(np.int64)
    if not len(ids):
        raise UserError(f"{name}: the document has no text")
    starts = np.flatnonzero((np.frombuffer(content, np.uint8) & 0xC0) != 0x80)  # first bytes of characters
    complete = np.searchsorted(np.append(starts, len(content)), token_ends, side="right") - 1  # after each token
    ends = [0, *complete.tolist()[:-1], len(text)]
    bounds = [*range(0, len(ids), block_size), len(ids)]
    spans = [(ends[start], ends[stop]) for start, stop in itertools.pairwise(bounds)]
    blocks = [Block(name, start, stop, text[start:stop]) for start, stop in spans]
    return blocks, np.pad(ids, (0, -len(ids) % block_size), constant_values=tokenizer.eot)


def encoded(name: str, text: object) -> bytes:
    """A text's bytes. Raises UserError, naming it, where it is no text or has half a character (a lone surrogate)."""
    if not isinstance(text, str):
        raise UserError(f"{name}: must be a text, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name}: has half a character (a lone surrogate) at {error.start}") from error
