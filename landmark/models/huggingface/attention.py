"""The attention functions registered with transformers, one for each original implementation.

Layers call them with rotated queries and keys. If the model gets the keyword argument `landmarks`, a
`LandmarkWindow` or a `LandmarkCache`, layers with full attention let it attend. Layers with a sliding window, and all
layers without `landmarks`, use the original implementation, or what computes the same faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from landmark.attention import Grouped, Packed, Scoring, Sinks, Window, has_kernel, landmark_attention, place_phase
from landmark.attention.layout import as_autocast, without_autocast
from landmark.attention.plain import has_products, window_attention
from landmark.utils.errors import UserError

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class LandmarkWindow:
    """Landmark attention inside whole windows, in training. landmark_layers: numbers of the layers that use it. phase:
    (B,), tokens missing from each first block; with `cu_seqlens`, as of `landmark.attention.Packed`, (documents,).
    seen: (B or 1, 1, T, T), bool, what each token sees in layers with a sliding window; None: there are none.
    """

    def __init__(
        self,
        landmark_layers: frozenset[int],
        block_size: int,
        phase: Tensor,
        cu_seqlens: Tensor | None = None,
        seen: Tensor | None = None,
    ):
        self.landmark_layers, self.block_size = landmark_layers, block_size
        self.phase, self.cu_seqlens, self._seen = phase, cu_seqlens, seen
        self.attended: set[int] = set()
        self.text_of_chunk = None  # it has windows

    def seen_in_window(self, queries: int, keys: int) -> Tensor | None:
        """What the queries see of the keys in layers with a sliding window, (B or 1, 1, queries, keys), bool."""
        return self._seen

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """Attend inside the window. q (B, H, T, d) and k (B, H_kv, T, d) are rotated. Returns (B, H, T, d)."""
        self.attended.add(layer)
        # Copied in the first layer alone.
        self.phase = place_phase(self.phase, "auto", q, self.block_size, has_kernel(Grouped(), scoring))
        layout = Window(self.block_size, self.phase)
        if self.cu_seqlens is not None:
            layout = Packed(self.block_size, self.phase, self.cu_seqlens)
        return landmark_attention(q, k, v, layout, scoring=scoring, extra=sinks)[0]


def check_attended(layers: frozenset[int], attended: set[int]) -> None:
    """Raise UserError if some of the layers did not attend with landmarks."""
    if missing := sorted(layers - attended):
        raise UserError(
            f"layers {missing} attended without landmarks: something replaced the model's attention; wrap the model "
            "after all other changes to it"
        )


def _with_landmarks(original: Attention) -> Attention:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        landmarks: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if landmarks is None:
            return original(module, query, key, value, attention_mask, **kwargs)
        layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        if layer not in landmarks.landmark_layers:
            if (seen := landmarks.seen_in_window(query.shape[2], key.shape[2])) is not None:
                attention_mask = seen = seen.to(query.device)
                attend = partial(original, module, **kwargs)
                out = _text_in_window(landmarks, attend, query, key, value, seen, **kwargs)
            else:
                out = _in_window(landmarks, query, key, value, **kwargs)
            return original(module, query, key, value, attention_mask, **kwargs) if out is None else (out, None)
        query, key, value = as_autocast(query, key, value)
        with without_autocast(query):
            scores = kwargs.get("s_aux")
            sinks = None if scores is None else Sinks(scores)
            out = landmarks.attend(
                layer, query, key, value, Scoring(kwargs.get("scaling"), kwargs.get("softcap")), sinks
            )
        return out.transpose(1, 2).contiguous(), None

    return attention


def _in_window(
    landmarks: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> Tensor | None:
    """What a layer with a sliding window returns of a cache's chunk, in which nothing is padding; None: not faster."""
    if scaling is None or sliding_window is None or softcap is not None or s_aux is not None or dropout:
        return None
    if isinstance(landmarks, LandmarkWindow) or (torch.is_grad_enabled() and query.requires_grad):
        return None
    out = window_attention(query, key, value, window=sliding_window, scale=scaling)
    return None if out is None else out.transpose(1, 2).contiguous()


def _text_in_window(
    landmarks: Any, attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, seen: Tensor, **kwargs: Any
) -> Tensor | None:
    """What a layer with a sliding window returns of a cache's chunk with landmarks: the text as if there were none, and
    the few landmarks by what they have `seen`; None: not faster.
    """
    if (text := landmarks.text_of_chunk) is None or not has_products(query, key, value):
        return None  # nothing is copied
    text, before = text.to(query.device), key.shape[2] - query.shape[2]
    at = torch.cat([torch.arange(before, device=query.device), before + text])
    own = _in_window(landmarks, query[:, :, text], key[:, :, at], value[:, :, at], **kwargs)
    if own is None:
        return None
    out = own.new_empty(len(own), query.shape[2], *own.shape[2:])
    others = torch.ones(query.shape[2], dtype=torch.bool, device=query.device).index_fill(0, text, False)
    out[:, text] = own
    out[:, others] = attend(query[:, :, others], key, value, seen[:, :, others])[0]
    return out


def _eager(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The eager attention in the file of the module's model, which adds its mask; transformers registers none."""
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(q.dtype).min)
    return sys.modules[type(module).__module__].eager_attention_forward(module, q, k, v, mask, **kwargs)


ATTENTION = {"sdpa": "landmark_sdpa", "eager": "landmark_eager"}  # registered names, by the implementations replaced
ORIGINALS: dict[str, Attention] = {"sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"], "eager": _eager}
for _name, _original in ORIGINALS.items():
    AttentionInterface.register(ATTENTION[_name], _with_landmarks(_original))
    AttentionMaskInterface.register(ATTENTION[_name], ALL_MASK_ATTENTION_FUNCTIONS[_name])


def with_landmarks(implementation: str) -> str | None:
    """The registered name that takes an implementation's place; None: there is none. Flash attention's is SDPA's."""
    return ATTENTION.get("sdpa" if implementation.startswith("flash_attention_") else implementation)
