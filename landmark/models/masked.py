"""A decoder for masked language modelling: it attends in both directions (paper, Appendix F)."""

import math
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention import ContextMiss
from landmark.attention.layout import AttentionInputs, check_phase
from landmark.attention.reference import landmark_attention_weights
from landmark.models.config import DecoderConfig
from landmark.models.decoder import Decoder, WindowInputs
from landmark.utils.errors import UserError


def landmark_attention_both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    phase: Tensor | None = None,
    *,
    alpha: float = 0.0,
    top_k: int | None = None,
) -> Tensor:
    """Landmark attention to earlier and later blocks, (B, H, T, d), as `landmark_attention`: a query attends to its own
    block, and to others by their landmarks' gates. A last block without its landmark is seen by its own tokens alone.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    phase, scale = check_phase(phase, len(q), block_size, q.device), 1 / math.sqrt(q.shape[-1])
    inputs = AttentionInputs(q, k, v, None, phase, None, None, block_size, 0, scale, alpha=alpha)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    return landmark_attention_weights(scores, inputs, causal=False, top_k=top_k)[0].to(v.dtype) @ v


class MaskedDecoder(Decoder):
    """Reads whole texts, and predicts hidden tokens: its logits are of each token itself, not of the next one."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.retrieved: int | None = None  # other blocks that a query attends to; None: all

    def attend_in_window(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: WindowInputs, extra: ContextMiss | None
    ) -> Tensor:
        """Attention in both directions."""
        if window.layout is None:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])
        block_size, phase = window.layout.block_size, window.layout.phase
        return landmark_attention_both_ways(q, k, v, block_size, phase, alpha=self.config.alpha, top_k=self.retrieved)

    def new_memory(self, **settings) -> NoReturn:
        """Raises UserError: there is none."""
        raise UserError("model.masked=true: the model reads whole texts, it has no memory and continues no text")

    def unlimited_memory(self, tokens: int) -> NoReturn:
        """Raises UserError: there is none."""
        self.new_memory()
