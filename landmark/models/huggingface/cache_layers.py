"""The layers of a `LandmarkCache`: those whose past is in the memory, and others, with a sliding window or a state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from landmark.memory.blocks.cache import rotate_by
from landmark.models.huggingface.families import CHUNKED, FULL, HYBRID, SLIDING
from landmark.utils.errors import UserError

_STATES = "conv", "recurrent"


@dataclass
class Chunk:
    """The chunk that is being read. positions: (1, T), None between chunks. attended: the layers that have attended.
    text: the places of the text's tokens among its tokens, where it has landmarks. seen: of these and the keys before,
    once a layer with a sliding window has asked.
    """

    positions: Tensor | None = None
    attended: set[int] = field(default_factory=set)
    text: Tensor | None = None
    seen: Tensor | None = None


class MemoryLayer(CacheLayerMixin):
    """A layer whose past is in the memory: attention gets the keys and values of the chunk alone."""

    is_sliding = False

    def __init__(self, chunk: Chunk, number: int):
        super().__init__()
        self._chunk, self._number = chunk, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises UserError outside of `LandmarkCache.reading`, where attention would see the chunk alone."""
        if self._chunk.positions is None:
            raise UserError(
                f"layer {self._number}: a landmark memory reached a model that does not read with landmarks; call the "
                "model that `wrap` or `load` returned, and nothing below it"
            )
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None: ...


class MemoryAndStateLayer(LinearAttentionLayer, MemoryLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A layer whose keys and values are in the memory, and which has a recurrent state beside them."""

    def __init__(self, chunk: Chunk, number: int, number_of_states: int = 1):
        MemoryLayer.__init__(self, chunk, number)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    update = MemoryLayer.update


class TextWindowLayer(DynamicSlidingWindowLayer):
    """A layer with a sliding window of a text with landmarks, which it does not keep: no later token sees them."""

    def __init__(self, chunk: Chunk, number: int, sliding_window: int):
        super().__init__(sliding_window)
        self._chunk = chunk

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The text before and the chunk, with its landmarks."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self._chunk.text is not None
        text = self._chunk.text.to(key_states.device)
        keys, values = self._behind(key_states, value_states)
        kept = self._behind(*(x.index_select(2, text) for x in (key_states, value_states)))
        self.keys, self.values = (x[:, :, 1 - self.sliding_window :] for x in kept)
        self.cumulative_length += len(text)
        return keys, values

    def _behind(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """These keys and values behind those that are kept."""
        assert self.keys is not None
        assert self.values is not None
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


def new_layers(kinds: Sequence[tuple[str, dict[str, Any]]], chunk: Chunk, with_landmarks: bool) -> list[Any]:
    """Layers that have read nothing. kinds: of `landmark.models.huggingface.families.cache_layers`. with_landmarks:
    whether the text has some.
    """
    own: dict[str, Any] = {FULL: MemoryLayer, HYBRID: MemoryAndStateLayer}
    if with_landmarks:
        own |= {SLIDING: TextWindowLayer, CHUNKED: TextWindowLayer}
    return [
        own[kind](chunk, number, **given) if kind in own else DYNAMIC_LAYER_TYPE_MAPPING[kind](**given)
        for number, (kind, given) in enumerate(kinds)
    ]


def copied(layer: Any, samples: Tensor | None = None) -> Any:
    """A copy of a layer with a window or a state, which goes on by itself. samples: these of the batch; None: all."""
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):  # of states, which are changed in place
            setattr(new, name, {key: _own(x, samples) for key, x in value.items()})
    if samples is not None and _has_window(layer):
        new.batch_select_indices(samples)
    return new


def _own(x: Any, samples: Tensor | None) -> Any:
    return x if not isinstance(x, Tensor) else x.clone() if samples is None else x[samples.to(x.device)]


def following(before: Any, layer: Any, start: int, frequencies: Tensor) -> Any:
    """A copy of a layer with a sliding window, `start` tokens later and behind the tokens of the one before. layer: may
    have read nothing, then None.
    """
    if not _has_window(layer):
        return copy.copy(before)
    copied = copy.copy(layer)
    if start:
        keys = rotate_by(frequencies, layer.keys, torch.tensor([start], device=layer.keys.device))
        both = torch.cat([before.keys, keys], 2), torch.cat([before.values, layer.values], 2)
        copied.keys, copied.values = (x[:, :, 1 - layer.sliding_window :] for x in both)
        copied.cumulative_length = start + layer.cumulative_length
    return copied


def _has_window(layer: Any) -> bool:
    return getattr(layer, "is_sliding", False) and layer.is_initialized


def content_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer with a window or a state, by name."""
    found = {}
    if _has_window(layer):
        found = {"keys": layer.keys, "values": layer.values, "length": torch.tensor(layer.cumulative_length)}
    for kind in _STATES:
        states = getattr(layer, f"{kind}_states", {}).items()
        found |= {f"{kind}.{number}": state for number, state in states if state is not None}
    return found


def fill(layer: Any, content: Mapping[str, Tensor], device: torch.device) -> None:
    """Give an empty layer the tensors of another one."""
    if "keys" in content:
        window = [content[name].to(device) for name in ("keys", "values")]
        if any(x.ndim != 4 for x in window) or window[0].shape[:3] != window[1].shape[:3]:
            raise ValueError("its keys and values do not fit each other")
        layer.lazy_initialization(*window)
        layer.keys, layer.values = window
        layer.cumulative_length = int(content["length"])
    for name, saved in content.items():
        kind, _, number = name.partition(".")
        if kind in _STATES:
            state = saved.to(device)
            layer.lazy_initialization(**{f"{kind}_states": state, "state_idx": int(number)})
            getattr(layer, f"{kind}_states")[int(number)].copy_(state)
            layer.has_previous_state[int(number)] = True
