"""Learned attention sinks: a score of each head for a place without a value, as in GPT-OSS."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.scoring import Scoring


@dataclass(frozen=True)
class Sinks:
    """A place without a value in the outer softmax, whose score is the same for all queries of a head.

    scores: (H,), in nats.
    """

    scores: Tensor

    def scores_of(self, q: Tensor, scoring: Scoring) -> Tensor:
        """The place's score of each query, (B, H, T), in float32 or float64. q: (B, H, T, d)."""
        of_heads = self.scores.to(torch.promote_types(q.dtype, torch.float32))[None, :, None]
        return of_heads.expand(q.shape[:3]).contiguous()

    def merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Add the place to a softmax that is computed already.

        out: (B, H, T, d); lse: (B, H, T), log-sum-exp of its scores in nats. Returns both with one more place.
        """
        sinks = self.scores.to(lse.dtype)[:, None]
        return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype), torch.logaddexp(lse, sinks.expand_as(lse))
