"""The cache of a model with landmarks: blocks and their landmarks where attention is full, a window where it slides."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from landmark.huggingface.attention import turn_back
from landmark.huggingface.families import SLIDING, inverse_frequencies, layer_types
from landmark.memory import Memory
from landmark.utils.errors import UserError


class LandmarkCache(Cache):
    """What is kept of a text that a model reads with landmarks, whose keys and values a `landmark.memory.Memory` holds.

    block_size: ℓ. settings: those of `Memory`. For transformers its length is that of the text, landmarks not counted.
    """

    def __init__(self, model: PreTrainedModel, block_size: int, **settings: Any):
        window: Any = getattr(model.config, "sliding_window", None)
        types = layer_types(model)
        super().__init__(
            layers=[DynamicSlidingWindowLayer(window) if kind == SLIDING else _InMemory() for kind in types]
        )
        self._frequencies = inverse_frequencies(model)
        self.slides = SLIDING in types
        self.memory = Memory(block_size, rope_base=self._frequencies, **settings)

    @property
    def stats(self) -> dict[str, Any]:
        """See `landmark.memory.Memory.stats`."""
        return self.memory.stats

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Position ids (1, length) of the tokens that come next, landmarks included.

        Where all keys go to the memory, which turns them itself, all are 0: nothing is there to be undone, exactly.
        """
        if not self.slides:
            return torch.zeros(1, length, dtype=torch.int64, device=device)
        return torch.arange(self.memory.position, self.memory.position + length, device=device)[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, position_ids: Tensor) -> Tensor:
        """q: (B, H, T, d); k, v: (B, H_kv, T, d), turned by position_ids. Returns (B, H, T, d)."""
        q, k = (turn_back(x, position_ids, self._frequencies) for x in (q, k))
        rescale = scale * math.sqrt(q.shape[-1])
        return self.memory.attend(layer, q if rescale == 1 else q * rescale, k, v)

    def commit(self) -> None:
        """The chunk is over, in all layers."""
        self.memory.commit()

    def reset(self) -> None:
        """Forget everything: a new text begins."""
        super().reset()
        self.memory.reset()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text read so far, landmarks not counted."""
        return self.memory.position - self.memory.position // (self.memory.block_size + 1)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """For masks: keys of this layer before the next query, landmarks counted."""
        return self.layers[layer_idx].get_seq_length()  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise UserError("a landmark memory cannot be reordered, repeated or cut: beam and assisted search need that")

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class _InMemory(CacheLayerMixin):
    """A layer whose keys and values go to the memory: attention is given those of the chunk alone."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None: ...
