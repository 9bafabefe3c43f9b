"""One layer of a memory: positions of its blocks, what it keeps between chunks, and what queries ask its blocks.

Positions are stingy (paper, Section 3.2.1, Figure 2), or true ones (Figure 6). The paper allots k+1 slots of W = ℓ+1
positions before the first incomplete block, and puts each block that is scored or attended to into one of them. Here
there are S = min(blocks fed, k+1) slots, so that up to k blocks have their true positions. Rotary positions depend on
distances alone. From a query that is i positions past the start of the first incomplete block, offset o of a block in
slot s is i − o + (S−s)·W positions away. So only the *lag* S−s is needed: 1 is the slot just before the incomplete
block, S the furthest one. The *age* of a block is 1 for the newest block.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from landmark.attention import Grouped
from landmark.attention.keys import Keys
from landmark.attention.rotary import RotaryTable, rotate
from landmark.memory.landmarks.block_store import BlockStore


@dataclass(frozen=True)
class Lags:
    """The lags of the blocks of a layer, for the queries of one chunk.

    own: of the newest blocks, how many have a lag of their own when they are scored; all older ones share the furthest.
    distances: for each lag 1…S the number of positions from the start of its slot to the first pending token.
    """

    own: int
    distances: tuple[int, ...]

    def scoring(self, ages: Tensor) -> Tensor:
        """The lag at which the landmark of a block of each age is scored."""
        return torch.where(ages <= self.own, ages, len(self.distances))

    def attending(self, ages: Tensor) -> Tensor:
        """The lags at which retrieved blocks are attended to, of ages (…, q), oldest first.

        Blocks that share a lag when they are scored fill the slots from the furthest on, the others fill the slots
        nearest to the chunk. There may be an empty slot between the two kinds.
        """
        if not self.own:
            return torch.ones_like(ages)
        slots, retrieved = len(self.distances), ages.shape[-1]
        lag = torch.arange(retrieved, 0, -1, device=ages.device)
        return lag.expand(ages.shape) if slots == retrieved else lag + (ages > self.own) * (slots - retrieved)


@dataclass(frozen=True)
class Stingy:
    """The paper's mapping: k+1 slots for all blocks."""

    name: ClassVar[str] = "stingy"

    def lags(self, blocks_fed: int, k: int, width: int) -> Lags:
        """The lags for a chunk. blocks_fed: complete blocks before it, dropped ones included."""
        return Lags(k, tuple(lag * width for lag in range(1, min(blocks_fed, k + 1) + 1)))

    def stored(self, rotary: RotaryTable, blocks_fed: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """The factors that rotate keys like (…, d) of new blocks, (n or 1, W, d/2): each by its offset in its block.

        shape: n and W, of the new blocks.
        """
        return rotary(0, shape[1], like)[None]


@dataclass(frozen=True)
class TruePositions:
    """True positions, for which a model must be trained: keys are stored rotated to their own, one lag serves all."""

    name: ClassVar[str] = "true"

    def lags(self, blocks_fed: int, k: int, width: int) -> Lags:
        return Lags(0, (blocks_fed * width,) if blocks_fed else ())

    def stored(self, rotary: RotaryTable, blocks_fed: int, shape: tuple[int, int], like: Tensor) -> Tensor:
        """As of `Stingy`, by the positions of keys in the text."""
        return rotary(blocks_fed * shape[1], shape[0] * shape[1], like).unflatten(0, shape)


Positions = Stingy | TruePositions


class LayerMemory:
    """The blocks of one layer, and what the next chunk needs of the tokens that are not stored in blocks yet.

    between: all that a saved memory has beside the blocks, by name, the samples in the first dimension: "pending_keys"
    and "pending_values" (B, H_kv, pending, d), not rotated, of the last, incomplete block; "last_key", the channels of
    the last normal token that the next one takes. chunk: the same after the present chunk, with complete blocks.
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
        """Keys and values (B, H_kv, pending + T, d) of pending tokens and a chunk (B, H_kv, T, d), not rotated."""
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
            self.chunk["last_key"] = last.clone()
        return shifted, v

    def end_chunk(self, stored: int) -> None:
        """The chunk is part of the text; its first `stored` tokens, pending ones included, are in blocks now."""
        assert self.chunk is not None
        for name in ("pending_keys", "pending_values"):
            x = self.chunk[name]
            self.chunk[name] = x[:, :, stored:].clone() if stored else x
        self.between, self.chunk = self.chunk, None


@dataclass(frozen=True, eq=False)
class Question:
    """What the queries of a chunk ask the blocks of a layer.

    layer: its number. position: stream position of the chunk's first token, landmarks included. state: the layer's
    blocks, and pending tokens before the chunk. q: (B, H, T, d), not rotated. start: position of the first query,
    counted from the first pending token. lags: of the blocks. scale, softcap: of the scores, in nats. backend: "triton"
    where its kernels may be used.

    cmt_weight: (B, H, T), the weight S of a context miss token, known before retrieval: the share of a query's
    attention that retrieved blocks get (paper, Appendix D). None: there is no such token. retrieves: (B, H, T), bool,
    the queries whose S is at least the cutoff; the others read nothing, and S is lost. None: all retrieve.
    """

    layer: int
    position: int
    state: LayerMemory
    block_size: int
    q: Tensor
    start: int
    rotary: RotaryTable
    lags: Lags
    gate: Grouped
    scale: float
    softcap: float | None
    backend: str
    cmt_weight: Tensor | None = None
    retrieves: Tensor | None = None

    @property
    def store(self) -> BlockStore:
        return self.state.store

    @cached_property
    def exact(self) -> Tensor:
        """The queries that rank blocks, (S, B, T, H, d), scaled, and rotated for lag 1…S.

        In float32 also where q is not, because rounding would change which blocks are the best.
        """
        q = self.q.to(torch.promote_types(self.q.dtype, torch.float32)) * self.scale
        starts = [self.start + distance for distance in self.lags.distances]
        factors, q = self.rotary.several(starts, q.shape[2], q)[:, None, :, None], q.transpose(1, 2)
        factors = factors.expand(-1, len(q), *factors.shape[2:]).flatten(1, 2)  # (S, B·T, 1, d/2)
        return rotate(q.flatten(0, 1).expand(len(factors), -1, -1, -1), factors).unflatten(1, q.shape[:2])

    @cached_property
    def rounded(self) -> Tensor:
        """The queries that attend to blocks: the same in the type of q."""
        return self.exact.to(self.q.dtype)

    def sets(self, granularity: str) -> tuple[int, int, int]:
        """Sets of blocks that are chosen, (B, heads, queries)."""
        _, batch, queries, heads, _ = self.exact.shape
        choosing = {"per_token": 1, "per_token_and_group": self.store.kv_heads}.get(granularity, heads)
        return batch, choosing, 1 if granularity == "per_head" else queries
