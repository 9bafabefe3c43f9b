"""A memory whose blocks are shared out over processes: block number n lies on process n mod the number of them.

All processes read the same text, with the same weights. What they send each other does not depend on the length of
the text. For each chunk and layer:

1. A process scores its own landmarks, and sends the scores and ages of its k best blocks. The k best of all are then
   known everywhere.
2. It attends to those of them that it has.
3. The outputs, weighed by the exponentials of their gates, and these weights are added up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from landmark.memory.block_attention import attend_to_blocks, merge
from landmark.memory.block_files import SavedRows
from landmark.memory.block_store import BlockStore
from landmark.memory.cutoff import QuerySelection
from landmark.memory.layer import LayerMemory
from landmark.memory.memory import Memory
from landmark.memory.positions import scoring_lag
from landmark.memory.settings import choosing_heads
from landmark.utils.errors import UserError
from landmark.utils.ranks import Ranks


class SharedStore(BlockStore):
    """The blocks of one layer that this process has. To the memory it looks like a store of all blocks.

    own: this process's blocks. added: blocks ever added, on all processes.
    """

    def __init__(self, own: BlockStore, ranks: Ranks) -> None:
        super().__init__(None)
        self.own, self._ranks = own, ranks
        self._kv_heads = 0

    def __len__(self) -> int:
        return self.added

    def add(self, keys: Tensor, values: Tensor, sizes: Tensor | None = None) -> None:
        assert sizes is None
        self._kv_heads = keys.shape[1]
        first = (self._ranks.rank - self.added) % self._ranks.size
        self.own.add(*(x[:, :, first :: self._ranks.size] for x in (keys, values)))
        self.added += keys.shape[2]

    def reserve(self, blocks: int, like: Tensor, saved: SavedRows | None = None) -> None:
        self.own.reserve(-(-blocks // self._ranks.size), like)

    @property
    def kv_heads(self) -> int:
        return self._kv_heads

    def own_ages(self) -> Tensor:
        """Ages, among all blocks, of those that this process has, newest first: (n,)."""
        numbers = torch.arange(len(self.own) - 1, -1, -1, device=self.own.landmarks.device)
        return self.added - (numbers * self._ranks.size + self._ranks.rank)

    def ages_here(self, ages: Tensor) -> tuple[Tensor, Tensor]:
        """Ages among the blocks of this process, 1 for blocks of others; and which blocks are its own."""
        numbers = self.added - ages
        is_own = numbers % self._ranks.size == self._ranks.rank
        return torch.where(is_own, len(self.own) - numbers // self._ranks.size, 1), is_own

    @property
    def block_bytes(self) -> int:
        return self.own.block_bytes if self.own.capacity else 0

    @property
    def bytes_kept(self) -> int:
        return self.own.bytes_kept if self.own.capacity else 0

    @property
    def device_bytes_kept(self) -> int:
        return self.own.device_bytes_kept if self.own.capacity else 0


class MemoryOverRanks(Memory):
    """A `Memory` that is shared out over processes, with the same results. Statistics of sizes are this process's."""

    def __init__(self, block_size: int, ranks: Ranks, **settings: Any) -> None:
        """
        Args:
            block_size: ℓ, normal tokens of a block.
            ranks: the processes.
            settings: of `Memory`. Raises UserError for those that need all blocks in one process: `max_blocks`, a
                `scorer` other than "landmark", and `index`; and for `gradient`, `fan_out`, `softcap`, `uneven`,
                `landmark_values`, `rerank`, `recent`, `joint_softmax` and `query_window`.
        """
        needed = {"max_blocks": None, "scorer": "landmark", "index": "exact", "gradient": False}
        needed |= {"fan_out": None, "softcap": None, "uneven": False, "landmark_values": False, "rerank": None}
        needed |= {"recent": 0, "joint_softmax": 0.0, "query_window": 1}
        for name, value in needed.items():
            if settings.get(name, value) != value:
                raise UserError(f"{name}={settings[name]}: a memory over several processes has only {name}={value}")
        self.ranks = ranks
        super().__init__(block_size, **settings)

    def new_layer(self) -> LayerMemory:
        return LayerMemory(SharedStore(super().new_layer().store, self.ranks))

    def save(self, folder: Any) -> None:
        raise UserError("a memory over several processes cannot be saved: read the text with one process")

    def load(self, folder: Any, device: str | torch.device = "cpu") -> None:
        raise UserError("a saved memory is loaded by one process alone")

    def select(self, samples: Tensor) -> Memory:
        raise UserError("samples of a memory over several processes cannot be reordered, as beam search would")

    def _retrieve(self, layer: int, state: LayerMemory, rotated_queries: Tensor, before: int = 0) -> Tensor:
        store = state.store
        assert isinstance(store, SharedStore)
        scores, ages = self._own_scores(store, rotated_queries, layer in self.tie_layers)
        if self.granularity != "per_token_and_head":
            everywhere = torch.stack(self.ranks.gathered(scores.logsumexp(-1))).logsumexp(0)
            scores = scores - everywhere[..., None]
            if self.granularity == "per_head":
                scores = scores.amax(2, keepdim=True)
            else:
                choosing = choosing_heads(self.granularity, scores.shape[1], store.kv_heads)
                scores = scores.unflatten(1, (choosing, -1)).amax(2)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)  # of equal scores the newer block first
        scores, ages = scores[..., : self.k], ages[order[..., : self.k]]
        room = 0, self.k - scores.shape[-1]
        scores = torch.cat(self.ranks.gathered(torch.nn.functional.pad(scores, room, value=-torch.inf)), -1)
        ages = torch.cat(self.ranks.gathered(torch.nn.functional.pad(ages, room, value=store.added + 1)), -1)
        ages, order = ages.sort(-1)
        scores, order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        best = ages.gather(-1, order)[..., : min(self.k, store.added)]
        return best.sort(-1, descending=True).values

    def _own_scores(self, store: SharedStore, rotated_queries: Tensor, tie: bool) -> tuple[Tensor, Tensor]:
        """Scores (B, H, T, n) of this process's blocks, newest first, and their ages (n,) among all blocks.

        Args:
            store: the layer's blocks.
            rotated_queries: (S, B, T, H, d), scaled, and rotated for lag 1…S.
            tie: whether all blocks older than the last k get the score of the newest of them.
        """
        slots, batch, queries, heads, _ = rotated_queries.shape
        ages = store.own_ages().to(rotated_queries.device)
        recent = int((ages <= self._num_recent).sum())
        scores = rotated_queries.new_empty(batch, heads, queries, len(ages))
        if len(ages):
            keys = store.own.landmarks[:, :, : len(ages)].flip(2)
            keys = keys.repeat_interleave(heads // keys.shape[1], 1)
            lags = scoring_lag(ages[:recent], self._num_recent, slots)
            scores = torch.einsum("bthd,bhnd->bhtn", rotated_queries[-1], keys)
            scores[..., :recent] = torch.einsum("nbthd,bhnd->bhtn", rotated_queries[lags - 1], keys[:, :, :recent])
        if tie and store.added > self._num_recent:
            of_newest = torch.where(ages == self._num_recent + 1, scores, 0.0).sum(-1)
            scores[..., recent:] = self.ranks.total(of_newest)[..., None]
        return scores, ages

    def _attend_and_merge(
        self,
        store: BlockStore,
        rotated_queries: Tensor,
        ages: Tensor,
        local: tuple[Tensor, Tensor],
        selection: QuerySelection | None,
        shift: Tensor | None,
    ) -> tuple[Tensor, None]:
        """As `Memory` does, without the weights of single blocks, and without a hierarchy."""
        assert isinstance(store, SharedStore)
        assert shift is None
        lags = self._lags(ages, len(rotated_queries))
        _, batch, queries, heads, dim = rotated_queries.shape
        gates = rotated_queries.new_full((batch, heads, queries, ages.shape[-1]), -torch.inf)
        block_out = rotated_queries.new_zeros(*gates.shape, dim)
        if len(store.own):
            here, is_own = store.ages_here(ages)
            selected = None if selection is None else selection.selected
            block_out, gates = attend_to_blocks(rotated_queries, store.own, here, lags, selected)
            is_own = is_own.repeat_interleave(heads // is_own.shape[1], 1)  # heads may choose together
            gates = gates.masked_fill(~is_own, -torch.inf)
        largest = self.ranks.largest(gates.amax(-1, keepdim=True))
        weights = (gates - largest).exp()
        own = torch.einsum("bhtq,bhtqd->bhtd", weights, block_out.to(weights.dtype))
        summed = self.ranks.total(torch.cat([own, weights.sum(-1, keepdim=True)], -1))
        total = summed[..., -1:]
        store.blocks_read = store.own.blocks_read
        merged = (summed[..., :-1] / total).to(local[0].dtype)
        return merge(local, merged[..., None, :], largest + total.log(), selection)[0], None
