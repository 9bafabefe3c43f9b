"""Learned attention sinks: a score of each head for a place without a value, as in GPT-OSS."""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add the sinks to a softmax that is computed already.

    out: (B, H, T, d); lse: (B, H, T), log-sum-exp of its scores in nats; sinks: (H,), scores. Returns both with one
    more place, whose value is 0.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype), torch.logaddexp(lse, sinks.expand_as(lse))
