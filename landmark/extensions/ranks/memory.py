"""A memory whose blocks are shared out over processes: block number n lies on process n mod the number of them.

All processes read the same text, with the same weights. What they send each other does not depend on the length of
the text. For each chunk and layer:

1. A process scores its own landmarks, and sends the scores and ages of its k best blocks. The k best of all are then
   known everywhere.
2. It attends to those of them that it has.
3. The outputs, weighed by the exponentials of their gates, and these weights are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention.keys import Keys
from landmark.memory import Memory, Stingy, Store
from landmark.memory.block_attention import attend_to_blocks, merge
from landmark.memory.choices import choosing_heads
from landmark.memory.layer import LayerMemory
from landmark.memory.positions import Positions
from landmark.memory.question import Question
from landmark.memory.select import Best, Choice, Cutoff
from landmark.memory.store import BlockStore
from landmark.memory.store.block_files import SavedRows
from landmark.utils.errors import UserError
from landmark.utils.ranks import Ranks


class SharedStore(BlockStore):
    """The blocks of one layer that this process has. To the memory it looks like a store of all blocks.

    own: this process's blocks. added: blocks ever added, on all processes.
    """

    def __init__(self, own: BlockStore, ranks: Ranks) -> None:
        self.own, self._ranks = own, ranks
        super().__init__()
        self._kv_heads = 0

    def __len__(self) -> int:
        return self.added

    def add(self, keys: Tensor, values: Tensor) -> None:
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
    def blocks_read(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own.blocks_read

    @blocks_read.setter
    def blocks_read(self, count: int) -> None:
        self.own.blocks_read = count

    @property
    def block_bytes(self) -> int:
        return self.own.block_bytes if self.own.capacity else 0

    @property
    def bytes_kept(self) -> int:
        return self.own.bytes_kept if self.own.capacity else 0

    @property
    def device_bytes_kept(self) -> int:
        return self.own.device_bytes_kept if self.own.capacity else 0


@dataclass(frozen=True)
class BestOverRanks(Best):
    """`Best` of the blocks of all processes."""

    ranks: Ranks | None = None

    def choose(self, question: Question) -> Choice:
        assert self.ranks is not None
        store, k = question.store, question.k
        assert isinstance(store, SharedStore)
        scores, ages = self._own_scores(question, store, self.ranks)
        if self.granularity != "per_token_and_head":
            everywhere = torch.stack(self.ranks.gathered(scores.logsumexp(-1))).logsumexp(0)
            scores = scores - everywhere[..., None]
            if self.granularity == "per_head":
                scores = scores.amax(2, keepdim=True)
            else:
                choosing = choosing_heads(self.granularity, scores.shape[1], store.kv_heads)
                scores = scores.unflatten(1, (choosing, -1)).amax(2)
        scores, order = scores.sort(dim=-1, descending=True, stable=True)  # of equal scores the newer block first
        scores, ages = scores[..., :k], ages[order[..., :k]]
        room = 0, k - scores.shape[-1]
        scores = torch.cat(self.ranks.gathered(F.pad(scores, room, value=-torch.inf)), -1)
        ages = torch.cat(self.ranks.gathered(F.pad(ages, room, value=store.added + 1)), -1)
        ages, order = ages.sort(-1)
        scores, order = scores.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        best = ages.gather(-1, order)[..., : min(k, store.added)]
        return Choice(best.sort(-1, descending=True).values)

    def _own_scores(self, question: Question, store: SharedStore, ranks: Ranks) -> tuple[Tensor, Tensor]:
        """Scores (B, H, T, n) of this process's blocks, newest first, and their ages (n,) among all blocks."""
        queries, own_lags = question.exact, question.lags.own
        _, batch, length, heads, _ = queries.shape
        ages = store.own_ages().to(queries.device)
        newest = int((ages <= own_lags).sum())
        scores = queries.new_empty(batch, heads, length, len(ages))
        if len(ages):
            keys = store.own.landmarks[:, :, : len(ages)].flip(2)
            keys = keys.repeat_interleave(heads // keys.shape[1], 1)
            lagged = queries[question.lags.scoring(ages[:newest]) - 1]
            scores = torch.einsum("bthd,bhnd->bhtn", queries[-1], keys)
            scores[..., :newest] = torch.einsum("nbthd,bhnd->bhtn", lagged, keys[:, :, :newest])
        if self.is_tied(question) and store.added > own_lags:
            of_newest = torch.where(ages == own_lags + 1, scores, 0.0).sum(-1)
            scores[..., newest:] = ranks.total(of_newest)[..., None]
        return scores, ages


class MemoryOverRanks(Memory):
    """A `Memory` that is shared out over processes, with the same results. Statistics of sizes are this process's."""

    def __init__(
        self,
        block_size: int,
        ranks: Ranks,
        k: int = 4,
        *,
        granularity: str = "per_token_and_head",
        cutoff: float | Sequence[float] = 0.0,
        keys: Keys | None = None,
        positions: Positions = Stingy(),  # noqa: B008 (these are frozen)
        store: Store = Store(),  # noqa: B008
        **others: Any,
    ) -> None:
        """
        Args:
            block_size: ℓ, normal tokens of a block.
            ranks: the processes.
            k: blocks that a query retrieves.
            granularity, cutoff: as of `landmark.memory.select.Best` and `Cutoff`.
            keys, positions, store: as of `Memory`; no blocks are dropped.
            others: observer and backend, as of `Memory`.

        Raises UserError for a store that drops blocks.
        """
        if store.max_blocks is not None:
            raise UserError(f"memory.blocks={store.max_blocks}: a memory over several processes drops none, set null")
        self.ranks, keys = ranks, keys or Keys()
        best = BestOverRanks(granularity, (0,) if keys.landmark == "token" else (), ranks)
        select = Cutoff(cutoff, best) if cutoff else best
        super().__init__(block_size, k, select=select, keys=keys, positions=positions, store=store, **others)

    def new_layer(self) -> LayerMemory:
        return LayerMemory(SharedStore(super().new_layer().store, self.ranks))

    def save(self, folder: Any, others: Any = None) -> NoReturn:
        raise UserError("a memory over several processes cannot be saved: read the text with one process")

    def load(self, folder: Any, device: str | torch.device = "cpu") -> NoReturn:
        raise UserError("a saved memory is loaded by one process alone")

    def select_samples(self, samples: Tensor) -> NoReturn:
        raise UserError("samples of a memory over several processes cannot be reordered, as beam search would")

    def read_and_merge(
        self, question: Question, choice: Choice, local: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """As `Memory` does, without the weights of single blocks."""
        store, queries, ages = question.store, question.rounded, choice.ages
        assert isinstance(store, SharedStore)
        lags, selection = question.lags.attending(ages), question.selection
        _, batch, length, heads, dim = queries.shape
        gates, weighted = queries.new_full((batch, heads, length, ages.shape[-1]), -torch.inf), None
        if len(store.own):
            here, is_own = store.ages_here(ages)
            selected = None if selection is None else selection.selected
            weighted, gates = attend_to_blocks(queries, store.own, here, lags, selected)
            is_own = is_own.repeat_interleave(heads // is_own.shape[1], 1)  # heads may choose together
            gates = gates.masked_fill(~is_own, -torch.inf)
        largest = self.ranks.largest(gates.amax(-1, keepdim=True))
        weights = (gates - largest).exp()
        own = weights.new_zeros(batch, heads, length, dim) if weighted is None else weighted(weights)
        summed = self.ranks.total(torch.cat([own, weights.sum(-1, keepdim=True)], -1))
        total = summed[..., -1:]
        merged = (summed[..., :-1] / total).to(local[0].dtype)
        return merge(local, (lambda weight: weight * merged, largest + total.log()), selection)[0], None
