"""The blocks that one attention layer stores: all, or the newest in a ring buffer."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from landmark.memory.tiers import Blocks, DeviceBlocks, Fetched, Store, TierCounts, grown, new_buffer

COPIED = 256  # blocks of a batch copied, saved or loaded at a time
ROWS = 64  # a store's rows are a multiple of this
SPARE = 8  # for so many rows at least one more is added
# What blocks are ranked by or stand for, (B, H, n, d), of their keys (B, H, n, W, d), the landmark's last.
Summary = Callable[[Tensor], Tensor]
LANDMARKS = "landmarks"


def mean_keys(keys: Tensor) -> Tensor:
    """The mean of the keys of each block's tokens."""
    return keys[..., :-1, :].mean(-2)


def _last_key(keys: Tensor) -> Tensor:
    """The landmark's key of blocks (…, ℓ + 1, d)."""
    return keys[..., -1, :]


class BlockStore:
    """Keys, values and landmark keys of complete blocks.

    Keys are stored rotated by their offsets 0…ℓ in the block, and never rotated again. Block number n, counted from the
    first block ever added, is in row n mod capacity; a full store grows, up to `max_blocks`. The *age* of a block is 1
    for the newest one, 2 for the one before.

    summaries: by name (B, H, capacity, d), on the device, in float32 where blocks are in half precision, because blocks
    are ranked by them; those of the arguments are besides the landmarks. counts: are updated when blocks are fetched.
    """

    def __init__(
        self,
        store: Store | None = None,
        summaries: Mapping[str, Summary] | None = None,
        counts: TierCounts | None = None,
    ):
        self._store, self._counts = store or Store(), counts or TierCounts()
        self.max_blocks = self._store.max_blocks
        self._make: dict[str, Summary] = {LANDMARKS: _last_key, **(summaries or {})}
        self.summaries = dict.fromkeys(self._make, torch.empty(0))
        self.added = 0  # blocks ever added
        self.capacity = 0
        self.dtype, self.block_shape = torch.float32, torch.Size((0, 0))  # of keys and values of a block and head
        self.blocks: Blocks = DeviceBlocks()

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def landmarks(self) -> Tensor:
        return self.summaries[LANDMARKS]

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add n blocks (B, H, n, W, d), oldest first, in the type of the values. UserError: the tier has no room."""
        if self.max_blocks is not None and (dropped := keys.shape[2] - self.max_blocks) > 0:
            self.added += dropped
            keys, values = keys[:, :, dropped:], values[:, :, dropped:]
        summaries = {name: make(keys) for name, make in self._make.items()}
        self.add_stored(keys[..., :-1, :].to(values.dtype), values[..., :-1, :], summaries)

    def add_stored(self, keys: Tensor, values: Tensor, summaries: Mapping[str, Tensor]) -> None:
        """Add n blocks (B, H, n, ℓ, d), at most `max_blocks`, with their summaries (B, H, n, d)."""
        self.reserve(self.added + keys.shape[2], values)
        for rows, part in self.runs(self.added, keys.shape[2]):
            self.blocks.write(rows.start, keys[:, :, part], values[:, :, part])
            for name, summary in self.summaries.items():
                summary[:, :, rows] = summaries[name][:, :, part]
        self.added += keys.shape[2]

    def stored(self, stop: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The blocks before number `stop`, oldest first, some at a time: rows (n, B, H, 2, ℓ, d) of keys and values in
        the CPU's memory, and summaries (B, H, n, d)."""
        first = self.added - len(self)
        for rows, _ in self.runs(first, stop - first):
            for row in range(rows.start, rows.stop, COPIED):
                piece = slice(row, min(row + COPIED, rows.stop))
                summaries = {name: x[:, :, piece] for name, x in self.summaries.items()}
                yield self.blocks.rows(row, piece.stop - row), summaries

    def reserve(self, blocks: int, like: Tensor) -> None:
        """Make room for blocks like (B, H, n, ℓ, d), at most `max_blocks`."""
        blocks = min(blocks, self.max_blocks or blocks)
        if blocks <= self.capacity:
            return
        capacity = max(blocks, -(-(self.capacity + self.capacity // SPARE) // ROWS) * ROWS)
        capacity = min(capacity, self.max_blocks or capacity)
        if not self.capacity:
            self.dtype, self.block_shape = like.dtype, like.shape[3:]
            self.blocks = self._store.new_blocks(like, self._counts)
            shape, exact = (*like.shape[:2], 0, like.shape[-1]), torch.promote_types(like.dtype, torch.float32)
            self.summaries = dict.fromkeys(self._make, new_buffer(*shape, dtype=exact, device=like.device))
        self.blocks.reserve(capacity)
        self.summaries = {name: grown(x, 2, capacity) for name, x in self.summaries.items()}
        self.capacity = capacity

    def select_samples(self, samples: Tensor, stop: int, into: "BlockStore") -> None:
        """Copy the blocks before number `stop` of these samples (n,) of the batch to an empty store."""
        into.added, here = self.added - len(self), samples.to(self.landmarks.device)
        for rows, summaries in self.stored(stop):
            keys, values = rows[:, samples.cpu()].permute(3, 1, 2, 0, 4, 5).to(here.device)
            into.reserve(stop, keys)
            into.add_stored(keys, values, {name: x[here] for name, x in summaries.items()})

    def runs(self, first: int, count: int) -> Iterator[tuple[slice, slice]]:
        """Blocks first … first+count−1 as runs of neighbouring rows: the rows, and which of the blocks they hold."""
        done = 0
        while done < count:
            row = (first + done) % self.capacity
            length = min(count - done, self.capacity - row)
            yield slice(row, row + length), slice(done, done + length)
            done += length

    @property
    def kv_heads(self) -> int:
        return self.landmarks.shape[1]

    @property
    def block_bytes(self) -> int:
        """Bytes of the keys and values of one block and head."""
        return 2 * self.block_shape.numel() * self.dtype.itemsize

    @property
    def bytes_kept(self) -> int:
        """Bytes of all that is stored, including the cache of a slower tier."""
        return self.blocks.bytes_kept + sum(x.nbytes for x in self.summaries.values())

    def fetch(self, places: Tensor) -> Fetched:
        """Bring the blocks at these `places` (n,) to the compute device."""
        return self.blocks.fetch(places)

    def in_place(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all blocks, (B·H·capacity, ℓ, d); None: they are not on the device."""
        if not isinstance(self.blocks, DeviceBlocks):
            return None
        return self.blocks.keys.flatten(0, 2), self.blocks.values.flatten(0, 2)

    def read_landmarks(self, places: Tensor) -> Tensor:
        """Keys (n, d) of the landmarks at these places, in the type of `landmarks`."""
        return self.landmarks.flatten(0, 2).index_select(0, places)

    def ages(self) -> Tensor:
        """The age of the block in each row in use, (blocks,)."""
        return (self.added - 1 - torch.arange(len(self), device=self.landmarks.device)) % max(1, self.capacity) + 1

    def rows(self, ages: Tensor) -> Tensor:
        """The row of the block of each age; the inverse of `ages`."""
        return (self.added - ages) % max(1, self.capacity)

    def places(self, ages: Tensor) -> Tensor:
        """The indices in (B, H_kv, capacity), flattened, of blocks of these ages (B, H, …); H_kv divides H."""
        batch, heads = ages.shape[:2]
        owner = torch.arange(batch * self.kv_heads, device=ages.device).view(batch, -1)
        owner = owner.repeat_interleave(heads // self.kv_heads, 1)
        return owner.view(batch, heads, *[1] * (ages.ndim - 2)) * self.capacity + self.rows(ages)
