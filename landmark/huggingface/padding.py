"""Padded batches of texts: which columns are text, and what the columns of a call must be."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.huggingface.landmark_cache import LandmarkCache
from landmark.utils.errors import UserError


def of_columns(mask: Tensor, columns: int) -> Tensor:
    """The columns of an attention mask (B, T or more) that belong to the last tokens. Raises UserError if too short."""
    if mask.ndim != 2 or mask.shape[1] < columns:
        raise UserError(f"attention_mask: must be (batch, {columns} or more) of 0 and 1, not {tuple(mask.shape)}")
    return mask[:, -columns:]


def check_ends(mask: Tensor, kept: int) -> None:
    """Raise UserError where a text has none of its tokens in the last `kept` columns of its mask (B, T)."""
    if without := (~mask[:, -kept:].bool().any(1)).nonzero().flatten().tolist():
        raise UserError(
            f"attention_mask: text {without[0]} ends with padding, so nothing follows its last {kept} columns: pad on "
            "the left (tokenizer.padding_side='left')"
        )


def check_positions(position_ids: Tensor | None, mask: Tensor, cache: LandmarkCache) -> None:
    """Raise UserError if the positions are not those of the text: a memory can give no others."""
    if position_ids is None:
        return
    before = torch.tensor(cache.lengths(len(mask)), device=mask.device)
    own = mask.long().cumsum(-1) - 1 + before[:, None]
    given = position_ids[..., -mask.shape[1] :].expand_as(mask) if position_ids.ndim == 2 else None
    if given is None or not torch.equal(given * mask, own.to(given.device) * mask):
        raise UserError("position_ids: a landmark memory counts the text's own tokens 0, 1, 2, …; leave them out")


def check_goes_on(ids: Tensor, mask: Tensor | None, cache: LandmarkCache) -> None:
    """Raise UserError unless the ids (B, T) repeat what a memory has read and go on. mask: (B, T), None: no padding."""
    columns = cache.get_seq_length()
    if not columns:
        return
    if len(ids) != cache.batch_size:
        raise UserError(f"the ids are of {len(ids)} texts, the memory is of {cache.batch_size}")
    own = torch.ones_like(ids, dtype=torch.bool) if mask is None else of_columns(mask, ids.shape[1]).bool()
    whole = "give generate the whole text, as torch.cat([memory.ids, new_ids], 1)"
    for number, (row, has, read) in enumerate(zip(ids, own, cache.texts(len(ids)), strict=True)):
        given, read = row[:columns][has[:columns]], read.to(ids.device)
        same = min(len(given), len(read))
        if other := (given[:same] != read[:same]).nonzero().flatten().tolist():
            raise UserError(
                f"past_key_values: the memory has read {len(read)} tokens, and text {number} differs from them at "
                f"token {other[0]} ({int(given[other[0]])}, read was {int(read[other[0]])}); an answer that was "
                f"decoded may have other ids: {whole}"
            )
        if len(given) != len(read) or ids.shape[1] <= columns:
            raise UserError(
                f"past_key_values: the memory has read {len(read)} tokens, and text {number} has nothing behind them: "
                f"{whole}"
            )


class Padded:
    """Outputs (B, columns, …) of texts with padding, which are 0 there. `put` fills them.

    mask: (B, columns), bool, which of the last columns are text. lengths: tokens of each text in all columns.
    """

    def __init__(self, mask: Tensor, lengths: list[int]):
        self._columns = [own.nonzero().flatten() for own in mask]
        self.first = [length - len(own) for length, own in zip(lengths, self._columns, strict=True)]  # tokens before
        self._shape = mask.shape
        self._filled: Tensor | None = None

    def put(self, row: int, start: int, values: Tensor) -> None:
        """The outputs (T, …) of a text from its token `start` on."""
        if self._filled is None:
            self._filled = values.new_zeros(*self._shape, *values.shape[1:])
        values = values[max(0, self.first[row] - start) :]
        start = max(0, start - self.first[row])
        columns = self._columns[row][start : start + len(values)].to(values.device)
        self._filled[row, columns] = values.to(self._filled.device)

    @property
    def filled(self) -> Tensor:
        """Raises UserError where nothing was put."""
        if self._filled is None:
            raise UserError("attention_mask: nothing but padding, so there is no text to read")
        return self._filled
