"""Documents cut into blocks of ℓ tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Block:
    """Part of a document: `text` is its bytes from `start` to `stop` (exclusive)."""

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
    without text.
    """
    if not isinstance(text, str):
        raise UserError(f"{name}: the document is of type {type(text).__name__}, not text")
    ids, token_ends = tokenizer.encode_with_ends(text)
    ids = ids.astype(np.int64)
    if not len(ids):
        raise UserError(f"{name}: the document has no text")
    content = text.encode()
    ends = [0, *token_ends.tolist()[:-1], len(content)]
    bounds = [*range(0, len(ids), block_size), len(ids)]
    spans = [(ends[start], ends[stop]) for start, stop in itertools.pairwise(bounds)]
    blocks = [Block(name, start, stop, content[start:stop].decode(errors="replace")) for start, stop in spans]
    return blocks, np.pad(ids, (0, -len(ids) % block_size), constant_values=tokenizer.eot)
