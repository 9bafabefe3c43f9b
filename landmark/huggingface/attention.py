"""The attention functions that are registered with transformers: one for each implementation that they stand in for.

A layer calls them with queries and keys that its model has turned already. Given `landmarks`, which reach them through
the model's keyword arguments, a layer with full attention does landmark attention; without, or with a sliding window,
it does what it did before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from landmark.attention import landmark_attention

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Landmarks(Protocol):
    """What attends in the place of a layer's own attention."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, position_ids: Tensor) -> Tensor: ...


class LandmarkWindow:
    """Landmark attention over whole windows, for training: nothing is kept.

    phase: (B,), tokens missing from the first block of each window (None: 0).
    """

    def __init__(self, block_size: int, phase: Tensor | None, backend: str = "auto"):
        self.block_size, self.phase, self.backend = block_size, phase, backend

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, position_ids: Tensor) -> Tensor:
        """q: (B, H, T, d); k, v: (B, H_kv, T, d), turned. Returns (B, H, T, d)."""
        return landmark_attention(
            q, k, v, block_size=self.block_size, phase=self.phase, scale=scale, backend=self.backend
        )


def turn_back(x: Tensor, position_ids: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """Queries or keys as they were before their model turned them.

    x: (B, H, T, d), of which element i turns with element i + d/2; position_ids: (B or 1, T); inverse_frequencies:
    (d/2,). Returns (B, H, T, d) with those that turn together side by side, as `landmark.memory` has them.
    """
    angle = position_ids[:, None, :, None].float() * inverse_frequencies.float()  # as the model computes it
    angle = angle.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.complex(*x.to(angle.dtype).chunk(2, -1)) * torch.polar(torch.ones_like(angle), -angle)
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype)


def _instead_of(plain: Attention) -> Attention:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        landmarks: Landmarks | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if landmarks is None or kwargs.get("sliding_window") is not None:
            return plain(module, query, key, value, attention_mask, **kwargs)
        out = landmarks.attend(
            int(module.layer_idx),  # pyright: ignore[reportArgumentType]
            query,
            key,
            value,
            scale=kwargs["scaling"],
            position_ids=kwargs["position_ids"],
        )
        return out.transpose(1, 2).contiguous(), None

    return attention


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """What the model's own file has for it: transformers registers none."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def _register() -> dict[str, str]:
    """Names of the registered functions by those of the implementations that they stand in for."""
    names = {}
    for name, plain in {"sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"], "eager": _eager}.items():
        names[name] = f"landmark_{name}"
        AttentionInterface.register(names[name], _instead_of(plain))
        AttentionMaskInterface.register(names[name], ALL_MASK_ATTENTION_FUNCTIONS[name])
    return names


ATTENTION = _register()
