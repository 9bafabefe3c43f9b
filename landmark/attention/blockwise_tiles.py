"""The tiles of blockwise.py: a few blocks of queries against the blocks of keys that they see.

The windows of a batch are cut at different phases. They are padded so that their blocks line up (`BlockAlignment`),
into buffers that are used again (`Workspace`): on the CPU allocating memory takes as long as the arithmetic on it.
N: sequences (the heads of some samples). Padded tensors are (N, rows, …).
"""

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention.scoring import capped_in_place
from landmark.utils.constants import LOG2_E


class Workspace:
    """Named buffers, each as large as the largest tensor that has used it."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape in the buffer `name`; its values are arbitrary, and the next call overwrites it."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)


_kept = threading.local()


def workspace(like: Tensor) -> Workspace:
    """A workspace for tensors with the type and device of `like`.

    On the CPU each thread keeps one for each type, a few tiles large. Elsewhere each call makes a new one, because
    PyTorch's allocator keeps the memory.
    """
    new = Workspace(like.dtype, like.device)
    return vars(_kept).setdefault(str(like.dtype), new) if like.device.type == "cpu" else new


@dataclass(frozen=True)
class BlockAlignment:
    """The rows of padded tensors that hold the windows of n samples.

    Padded tensors are (N, rows, d), N = n · heads, their rows whole blocks. Padded keys begin with block 0, padded
    queries with block `first`.

    width: W = ℓ+1. future: (W, W, 1), indexed by the offsets of a key and of a query in one block: whether the key is
    hidden, because it is later or the block's landmark. hidden: (n, 1, ℓ, 1), whether a token of the first block is
    padding; None: there is no padding.
    """

    width: int
    phases: tuple[int, ...]
    prefix: int
    queries: int
    heads: int
    future: Tensor
    hidden: Tensor | None

    @property
    def blocks(self) -> int:
        return -(-(self.prefix + self.queries + max(self.phases)) // self.width)

    @property
    def first(self) -> int:
        """The first block with queries."""
        return self.prefix // self.width

    def pad(self, x: Tensor, padded: Tensor) -> Tensor:
        """Copy (n, H, T, d), queries or keys, into (N, rows, d), which is returned."""
        padded[:, : 2 * self.width] = 0
        padded[:, -2 * self.width :] = 0
        parts = padded.unflatten(0, (len(x), -1))
        for sample, part, rows in zip(x, parts, self._rows(x.shape[2]), strict=True):
            part[:, rows] = sample
        return padded

    def unpad(self, padded: Tensor, x: Tensor, start: int = 0) -> None:
        """The inverse of `pad`. padded: the rows from `start` on, all or some; x is written only where they reach."""
        parts, stop = padded.unflatten(0, (len(x), -1)), start + padded.shape[1]
        for sample, part, rows in zip(x, parts, self._rows(x.shape[2]), strict=True):
            low, high = max(start, rows.start), min(stop, rows.stop)
            if low < high:
                sample[:, low - rows.start : high - rows.start] = part[:, low - start : high - start]

    def _rows(self, length: int) -> Iterator[slice]:
        """The rows of each sample's queries, or keys, in the padded tensor."""
        skipped = self.first * self.width if length == self.queries else 0
        end = self.prefix + self.queries - skipped
        return (slice(phase + end - length, phase + end) for phase in self.phases)


@functools.lru_cache(256)
def align_blocks(
    width: int, phases: tuple[int, ...], prefix: int, queries: int, heads: int, device: torch.device
) -> BlockAlignment:
    """The alignment of the windows of a batch, computed once for the same arguments."""
    offset = torch.arange(width, device=device)
    future = (offset[:, None] > offset) | (offset[:, None] == width - 1)
    hidden = offset[:-1] < torch.tensor(phases, device=device)[:, None]
    hidden = hidden[:, None, :, None] if any(phases) else None
    return BlockAlignment(width, phases, prefix, queries, heads, future[..., None], hidden)


def product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """Batched matrix product a·b·scale, written to `out` and returned."""
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


@dataclass(frozen=True)
class Tile:
    """The queries of blocks start … stop−1 against the keys of blocks 0 … stop−1."""

    alignment: BlockAlignment
    start: int
    stop: int

    @property
    def row(self) -> int:
        """First row of the tile in the padded queries."""
        return (self.start - self.alignment.first) * self.alignment.width

    def queries(self, padded: Tensor) -> Tensor:
        """The tile's rows of a tensor with a row for each query."""
        return padded[:, self.row : self.row + (self.stop - self.start) * self.alignment.width]

    def row_of(self, padded: Tensor) -> Tensor:
        """The tile's part of one number for each query: (N, rows, 1) → (N, 1, query)."""
        return self.queries(padded).mT

    def controlled(self, blocks: Tensor) -> Tensor:
        """Whether a landmark is controlled, (n, blocks) → (N, block, query); False for the query's own block."""
        mask = blocks[:, : self.stop].repeat_interleave(self.alignment.heads, 0)[..., None]
        mask = mask.repeat(1, 1, (self.stop - self.start) * self.alignment.width)
        self.own(mask).fill_(False)
        return mask

    def keys(self, padded: Tensor) -> Tensor:
        """The tile's rows of a tensor with a row for each key."""
        return padded[:, : self.stop * self.alignment.width]

    def blocked(self, x: Tensor) -> Tensor:
        """(N, keys, queries) → (N, block, offset, queries)."""
        return x.unflatten(1, (self.stop, self.alignment.width))

    def own(self, x: Tensor) -> Tensor:
        """The part of each query's own block, a view: (N, block, …, queries) → (N, …, offset, block)."""
        return x.unflatten(-1, (-1, self.alignment.width)).diagonal(-self.start, 1, x.ndim - 1)

    def scores(self, q: Tensor, k: Tensor, scale: float, cap: float | None, work: Workspace) -> Tensor:
        """Scores (N, block, offset, query) of all keys, in units of log 2. q, k: padded. cap: in nats."""
        keys, queries = self.keys(k), self.queries(q)
        scores = work("scores", len(q), keys.shape[1], queries.shape[1])
        product(keys, queries.mT, scores, scale * LOG2_E)
        return self.blocked(capped_in_place(scores, None if cap is None else cap * LOG2_E))

    def gates(self, scores: Tensor) -> Tensor:
        """Scores of the landmarks (N, block, query), −∞ for the query's own block and later ones."""
        gates = scores[:, :, -1].clone()
        for block in range(self.start + 1, self.stop):
            gates[:, block, : (block - self.start) * self.alignment.width] = -torch.inf
        self.own(gates).fill_(-torch.inf)
        return gates

    def mask(self, scores: Tensor) -> Tensor:
        """Put −∞ in the scores, in place, of landmarks, of padding before the window, and of later tokens."""
        scores[:, :, -1] = -torch.inf
        if self.alignment.hidden is not None:
            first = scores[:, 0, :-1].unflatten(0, (-1, self.alignment.heads))
            first.masked_fill_(self.alignment.hidden, -torch.inf)
        for block in range(self.start + 1, self.stop):
            scores[:, block, :, : (block - self.start) * self.alignment.width] = -torch.inf
        self.own(scores).masked_fill_(self.alignment.future, -torch.inf)
        return scores
