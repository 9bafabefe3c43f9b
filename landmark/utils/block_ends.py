"""The rule by which blocks end early: at the ends of sentences or lines, and of documents. Loads no numpy.

`landmark.utils.block_places` applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from landmark.utils.errors import UserError

BLOCK_ENDS = ("fixed", "sentences", "lines")  # `model.block_ends`


@dataclass(frozen=True)
class BlockEnds:
    """The rule by which blocks close.

    Args:
        block_size: ℓ, most tokens of a block.
        least: tokens of a block from which on it may end at one of `ends`.
        ends: ids of the tokens that end a sentence or a line.
        document_end: id of end of text.
    """

    block_size: int
    least: int
    ends: tuple[int, ...]
    document_end: int


class Ids(Protocol):
    """The ids of a tokenizer at which blocks may end."""

    @property
    def eot(self) -> int: ...
    @property
    def sentence_ends(self) -> tuple[int, ...]: ...
    @property
    def line_ends(self) -> tuple[int, ...]: ...


def block_ends(kind: str | None, block_size: int, least: int | None, ids: Ids) -> BlockEnds | None:
    """The rule of the settings of a model, None where all blocks have ℓ tokens.

    Args:
        kind: `model.block_ends`; None: "fixed".
        block_size: ℓ.
        least: `model.least_block_size`; None: ℓ/2, rounded down, at least 1.
        ids: of the tokenizer.

    Raises UserError where no id ends a sentence or a line.
    """
    if kind in (None, "fixed"):
        return None
    ends = ids.sentence_ends if kind == "sentences" else ids.line_ends
    if not ends:
        raise UserError(f"model.block_ends={kind}: none of the tokenizer's ids ends one, set model.block_ends=fixed")
    return BlockEnds(block_size, max(1, block_size // 2) if least is None else least, ends, ids.eot)


def sentence_ends(pieces: Sequence[bytes]) -> tuple[int, ...]:
    """The ids of the tokens that end a sentence: their text ends with . ! or ?, perhaps with quotes or brackets behind.

    pieces: the bytes of each id.
    """
    marks = "\"')]}’”»*_ \t\r\n"
    ends = []
    for token, piece in enumerate(pieces):
        text = piece.decode("utf-8", errors="replace").rstrip(marks)
        if text.endswith((".", "!", "?")):
            ends.append(token)
    return tuple(ends)


def line_ends(pieces: Sequence[bytes]) -> tuple[int, ...]:
    """The ids of the tokens that end a line: their text has a line break. pieces: the bytes of each id."""
    return tuple(token for token, piece in enumerate(pieces) if b"\n" in piece)
