"""The part of a memory that belongs to one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.attention.keys import Keys
from landmark.memory.store import BlockStore


class LayerMemory:
    """The blocks of one layer, and what the next chunk needs of the tokens that are not stored in blocks yet.

    between: by name, the samples in the first dimension: "pending_keys" and "pending_values" (B, H_kv, pending, d), not
        rotated, of the last, incomplete block; "last_key" of the last normal token, the channels that the next one
        takes. All that a saved memory has beside the blocks.
    chunk: the same after the present chunk, with the pending tokens of complete blocks; None: there is no chunk.
    """

    def __init__(self, store: BlockStore):
        self.store = store
        self.between: dict[str, Tensor] = {}
        self.chunk: dict[str, Tensor] | None = None

    @property
    def pending(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values (B, H_kv, pending, d) of the pending tokens, not rotated; None: nothing was read."""
        return (self.between["pending_keys"], self.between["pending_values"]) if self.between else None

    @property
    def num_pending(self) -> int:
        """Tokens that are pending, landmarks included."""
        return 0 if self.pending is None else self.pending[0].shape[2]

    def begin_chunk(self, k: Tensor, v: Tensor, keys: Keys, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H_kv, pending + T, d) of the pending tokens and of a chunk.

        Args:
            k, v: (B, H_kv, T, d), k not rotated.
            keys: how keys are made.
            width: W = ℓ+1.
        """
        end, is_landmark = self.num_pending + k.shape[2], None
        if keys.offset and end // width > self.num_pending // width:
            is_landmark = torch.arange(self.num_pending, end, device=k.device)[None] % width == width - 1
        last, after = self.between.get("last_key"), int(end % width == 0)
        shifted = keys.shifted(k, is_landmark, last)
        if k.shape[2] > after:
            last = keys.last(k, after)
        if self.pending is not None:
            shifted, v = torch.cat([self.pending[0], shifted], 2), torch.cat([self.pending[1], v], 2)
        self.chunk = {"pending_keys": shifted, "pending_values": v}
        if last is not None:
            self.chunk["last_key"] = last.detach().clone()
        return shifted, v

    def end_chunk(self, stored: int) -> None:
        """The chunk is part of the text; its first `stored` tokens, pending ones included, are in blocks now."""
        assert self.chunk is not None
        for name in ("pending_keys", "pending_values"):
            x = self.chunk[name]
            self.chunk[name] = (x[:, :, stored:].clone() if stored else x).detach()
        self.between, self.chunk = self.chunk, None

    def select_samples(self, samples: Tensor, into: LayerMemory) -> None:
        """Copy these samples (n,) of the batch to an empty layer."""
        self.store.select_samples(samples, into.store)
        into.between = {name: x.index_select(0, samples.to(x.device)) for name, x in self.between.items()}
