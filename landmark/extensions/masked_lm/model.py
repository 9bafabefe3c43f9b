"""A plain or a landmark decoder whose tokens see later ones too."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from landmark.attention import ContextMiss
from landmark.extensions.masked_lm import check_model
from landmark.extensions.masked_lm.attention import full_attention, landmark_attention_both_ways
from landmark.models.config import DecoderConfig
from landmark.models.decoder import Decoder, ReadWindow
from landmark.utils.errors import UserError


class Model(Decoder):
    """Reads whole texts, and predicts hidden tokens: its logits are of each token itself, not of the next one."""

    def __init__(self, config: DecoderConfig):
        """Raises UserError for a model that reads in one direction."""
        check_model(config.kind, config.cmt, config.backend)
        super().__init__(config)

    def attend_in_window(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: ReadWindow, extra: ContextMiss | None
    ) -> Tensor:
        """Attention in both directions.

        Args: as in `Decoder.attend_in_window`.
        """
        if window.layout is None:
            return full_attention(q, k, v)
        block_size, phase = window.layout.block_size, window.layout.phase
        return landmark_attention_both_ways(q, k, v, block_size, phase, alpha=self.config.alpha, top_k=window.top_k)

    def new_memory(self, **settings) -> NoReturn:
        """Raises UserError: there is none."""
        raise UserError("model.masked=true: the model reads whole texts, it has no memory and continues no text")

    def unlimited_memory(self, tokens: int) -> NoReturn:
        """Raises UserError: there is none."""
        self.new_memory()
