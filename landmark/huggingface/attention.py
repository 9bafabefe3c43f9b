"""The attention functions registered with transformers, one for each original implementation.

Layers call them with rotated queries and keys. If the model gets the keyword argument `landmarks`, layers with full
attention use landmark attention. Layers with a sliding window, and all layers without `landmarks`, use the original
implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from landmark.attention import landmark_attention, place_phase

if TYPE_CHECKING:
    from landmark.huggingface.landmark_cache import LandmarkCache

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class LandmarkWindow:
    """Landmark attention inside whole windows, for training: nothing is kept.

    phase: (B,), tokens missing from the first block of each window.
    """

    def __init__(self, block_size: int, phase: Tensor):
        self.block_size, self.phase = block_size, phase

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, position_ids: Tensor) -> Tensor:
        """Attend inside the window.

        Args:
            layer: number of the layer; not used.
            q: (B, H, T, d), rotated.
            k, v: (B, H_kv, T, d), k rotated.
            scale: factor of the scores.
            position_ids: (B, T); not used.

        Returns (B, H, T, d).
        """
        self.phase = place_phase(self.phase, "auto", q, self.block_size)  # copied in the first layer alone
        return landmark_attention(q, k, v, block_size=self.block_size, phase=self.phase, scale=scale)


def _with_landmarks(original: Attention) -> Attention:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        landmarks: LandmarkWindow | LandmarkCache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if landmarks is None or kwargs.get("sliding_window") is not None:
            return original(module, query, key, value, attention_mask, **kwargs)
        layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        out = landmarks.attend(layer, query, key, value, scale=kwargs["scaling"], position_ids=kwargs["position_ids"])
        return out.transpose(1, 2).contiguous(), None

    return attention


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The eager attention in the file of the module's model; transformers registers none."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def _register() -> dict[str, str]:
    """The registered names, by the names of the implementations that they replace."""
    names = {}
    for name, original in {"sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"], "eager": _eager}.items():
        names[name] = f"landmark_{name}"
        AttentionInterface.register(names[name], _with_landmarks(original))
        AttentionMaskInterface.register(names[name], ALL_MASK_ATTENTION_FUNCTIONS[name])
    return names


ATTENTION = _register()
