"""The cache of a model with landmarks: a memory for layers with full attention, a window for the other layers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from landmark.huggingface.families import SLIDING, inverse_frequencies, layer_types
from landmark.memory import Memory
from landmark.utils.errors import UserError


class LandmarkCache(Cache):
    """Past keys and values of a text that a model reads with landmarks; a `landmark.memory.Memory` holds them.

    To transformers, its length is the number of the text's own tokens, without landmarks. For each chunk of a text:

    1. the model asks for `positions` and calls `attend` in each layer with full attention;
    2. `attend` undoes the rotation, because the memory assigns positions itself, and attends through the memory;
    3. after the last layer, `commit` stores the chunk's blocks.

    block_size: ℓ. settings: of `Memory`. Raises UserError for one that it does not have, or without meaning.
    """

    def __init__(self, model: PreTrainedModel, block_size: int, **settings: Any):
        known = inspect.signature(Memory).parameters.keys() - {"block_size", "rope_base", "model", "backend"}
        if wrong := sorted(settings.keys() - known):
            raise UserError(f"memory has no setting {', '.join(wrong)}: it has {', '.join(sorted(known))}")
        window: Any = getattr(model.config, "sliding_window", None)
        types = layer_types(model)
        super().__init__(
            layers=[DynamicSlidingWindowLayer(window) if kind == SLIDING else _MemoryLayer() for kind in types]
        )
        self._frequencies = inverse_frequencies(model)
        self.slides = SLIDING in types
        self.memory = Memory(block_size, rope_base=self._frequencies, **settings)

    @property
    def stats(self) -> dict[str, Any]:
        """See `landmark.memory.Memory.stats`."""
        return self.memory.stats

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Position ids (1, length) of the next tokens, landmarks included.

        Without layers with a sliding window all are 0: the rotation is the identity, and undoing it is exact.
        """
        if not self.slides:
            return torch.zeros(1, length, dtype=torch.int64, device=device)
        return torch.arange(self.memory.position, self.memory.position + length, device=device)[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, position_ids: Tensor) -> Tensor:
        """Attend to the chunk and to the memory.

        Args:
            layer: its number.
            q: (B, H, T, d), rotated by position_ids.
            k: (B, H_kv, T, d), rotated by position_ids.
            v: (B, H_kv, T, d).
            scale: factor of the scores.
            position_ids: (B or 1, T).

        Returns (B, H, T, d).
        """
        q, k = (unrotate(x, position_ids, self._frequencies) for x in (q, k))
        rescale = scale * math.sqrt(q.shape[-1])
        return self.memory.attend(layer, q if rescale == 1 else q * rescale, k, v)

    def commit(self) -> None:
        """End the chunk, in all layers."""
        self.memory.commit()

    def reset(self) -> None:
        """Forget everything: a new text begins."""
        super().reset()
        self.memory.reset()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text read so far, without landmarks."""
        return self.memory.position - self.memory.position // (self.memory.block_size + 1)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """For masks: keys of this layer before the next query, with landmarks."""
        return self.layers[layer_idx].get_seq_length()  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise UserError("a landmark memory cannot be reordered, repeated or cut, as beam and assisted search need")

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class _MemoryLayer(CacheLayerMixin):
    """A layer whose past is in the memory: attention gets the keys and values of the chunk alone."""

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


def unrotate(x: Tensor, position_ids: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """Undo a model's rotation of queries or keys.

    x: (B, H, T, d), where elements i and i + d/2 form a pair; position_ids: (B or 1, T); inverse_frequencies: (d/2,),
    radians a position. Returns (B, H, T, d) with the elements of a pair side by side, as in `landmark.memory`.
    """
    angle = position_ids[:, None, :, None].float() * inverse_frequencies.float()  # as the model computes it
    angle = angle.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.complex(*x.to(angle.dtype).chunk(2, -1)) * torch.polar(torch.ones_like(angle), -angle)
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype)
