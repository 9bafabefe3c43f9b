"""Padded batches of texts: which columns are text, and the outputs of texts that were read one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from landmark.huggingface.landmark_cache import LandmarkCache
from landmark.utils.errors import UserError


def of_columns(mask: Tensor, columns: int) -> Tensor:
    """The columns of an attention mask (B, T or more) that belong to the last tokens. Raises UserError if too short."""
    if mask.ndim != 2 or mask.shape[1] < columns:
        raise UserError(f"attention_mask: must be (batch, {columns} or more) of 0 and 1, not {tuple(mask.shape)}")
    return mask[:, -columns:]


def check_positions(position_ids: Tensor | None, mask: Tensor, cache: LandmarkCache) -> None:
    """Raise UserError if the positions are not those of the text: a memory can give no others."""
    if position_ids is None:
        return
    samples = cache.samples or [cache] * len(mask)
    before = torch.tensor([sample.get_seq_length() for sample in samples], device=mask.device)
    own = mask.long().cumsum(-1) - 1 + before[:, None]
    given = position_ids[..., -mask.shape[1] :].expand_as(mask) if position_ids.ndim == 2 else None
    if given is None or not torch.equal(given * mask, own.to(given.device) * mask):
        raise UserError("position_ids: a landmark memory counts the text's own tokens 0, 1, 2, …; leave them out")


def joined(rows: list[tuple[Any, Tensor, Tensor]], cache: LandmarkCache) -> CausalLMOutputWithPast:
    """The outputs of samples that were read one by one, as one batch with 0 for padding.

    rows: of each sample its output, None for padding alone, and which of the columns were read: those whose logits are
    returned, and all.
    """
    some = next((output for output, _, _ in rows if output is not None), None)
    if some is None:
        raise UserError("attention_mask: nothing but padding, so there is no text to read")

    def batch(parts: list[Tensor | None], columns: list[Tensor], like: Tensor) -> Tensor:
        empty = [like.new_zeros(len(own), like.shape[-1]) for own in columns]
        filled = [
            row if part is None else row.index_copy(0, own.nonzero().squeeze(1), part[0])
            for row, part, own in zip(empty, parts, columns, strict=True)
        ]
        return torch.stack(filled)

    outputs = [output for output, _, _ in rows]
    logits = [None if output is None else output.logits for output in outputs]
    logits = batch(logits, [kept for _, kept, _ in rows], some.logits)
    hidden = None
    if some.hidden_states is not None:
        everything = [own for _, _, own in rows]
        hidden = tuple(
            batch([None if output is None else output.hidden_states[layer] for output in outputs], everything, like)
            for layer, like in enumerate(some.hidden_states)
        )
    return CausalLMOutputWithPast(logits=logits, past_key_values=cache, hidden_states=hidden)
