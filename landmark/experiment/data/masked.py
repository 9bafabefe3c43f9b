"""Text for masked language modelling (paper, Appendix F): 15 % of the tokens are hidden, and predicted.

Every hidden token becomes the mask, in training as in evaluation. BERT leaves a tenth of them as they are and draws
another tenth at random, so that a model that is tuned without masks has seen text without them; here none is.
Landmarks L and end of text E are never hidden. With masks M, and - where there is no loss::

    window          b c L d e E L f g
    tokens          b M L d e E L M g
    targets         - c - - - - - f -
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from landmark.experiment.data.random_numbers import MASKS, random_numbers
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch

SHARE = 0.15
_VALIDATION, _TEXT = 2**64 - 1, 2**64 - 2  # used instead of a step
_DRAWN = 4096  # tokens of a text whose random numbers are drawn together


@dataclass(frozen=True)
class MaskedTokens:
    """The hidden tokens of windows and texts. mask: id that hides a token. kept: ids that are never hidden."""

    mask: int
    kept: Sequence[int]

    def for_step(self, batch: WindowBatch, seed: int, step: int, indices: range) -> WindowBatch:
        """Some windows of a step with hidden tokens, and those as targets, as a function of seed, step and index."""
        return self._hide(batch, random_numbers(seed, step, MASKS, indices, (batch.tokens.shape[1],)))

    def for_validation(self, batch: WindowBatch, windows: Sequence[int] | np.ndarray) -> WindowBatch:
        """The same for validation windows, as a function of each window's number."""
        shape = (batch.tokens.shape[1],)
        drawn = [random_numbers(int(window), _VALIDATION, MASKS, range(1), shape) for window in windows]
        return self._hide(batch, np.concatenate(drawn))

    def mask_text(self, tokens: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Raw ids (B, L) with masks, and which are hidden, by their places in a stream. starts: (B,), of rows."""
        hidden = self._drawn_below(np.stack([_numbers_at(start, tokens.shape[1]) for start in starts]), tokens)
        return tokens.masked_fill(hidden, self.mask), hidden

    def _hide(self, batch: WindowBatch, drawn: np.ndarray) -> WindowBatch:
        hidden = self._drawn_below(drawn, batch.tokens)
        tokens, targets = batch.tokens.masked_fill(hidden, self.mask), batch.tokens.masked_fill(~hidden, NO_LOSS)
        return replace(batch, tokens=tokens, targets=targets)

    def _drawn_below(self, drawn: np.ndarray, tokens: Tensor) -> Tensor:
        hidden = torch.from_numpy(drawn < np.uint64(SHARE * 2.0**64)).to(tokens.device)
        return hidden & ~torch.isin(tokens, torch.tensor(list(self.kept), device=tokens.device))


def masked_tokens(tokenizer: Tokenizer) -> MaskedTokens:
    """The mask is the id after the landmark. Raises UserError where that is not unused."""
    mask = tokenizer.landmark + 1
    if mask >= tokenizer.vocab_size or tokenizer.byte_lengths[mask] or mask == tokenizer.eot:
        raise UserError(f"tokenizer={tokenizer.name}: has no unused id for the mask, choose gpt2, code or bytes")
    return MaskedTokens(mask, (tokenizer.landmark, tokenizer.eot))


def _numbers_at(start: int, length: int) -> np.ndarray:
    """Random numbers of the places start … start+length−1 of a stream, uint64 (length,)."""
    first, last = start // _DRAWN, (start + length - 1) // _DRAWN
    drawn = [random_numbers(part, _TEXT, MASKS, range(1), (_DRAWN,))[0] for part in range(first, last + 1)]
    return np.concatenate(drawn)[start - first * _DRAWN :][:length]
