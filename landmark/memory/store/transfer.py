"""Copies of blocks from a slower tier to the compute device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from landmark.memory.store.buffers import new_buffer

Read = Callable[[Tensor, Tensor], Tensor]  # reads the blocks at places (n,) into a tensor (n, 2·ℓ·d) on the CPU


class Transfer:
    """Reads blocks and copies them to the compute device.

    If the device is the CPU, a call waits for the copy. On a GPU blocks go through pinned memory and a CUDA stream of
    their own: the GPU continues with the work launched before, and work launched later waits for the copy. One of two
    pinned buffers is filled while the other is copied.
    """

    def __init__(self, like: Tensor):
        """like: (B, H, n, ℓ, d), a tensor with the blocks' shape, type and device."""
        self._block, self._dtype, self._device = like.shape[3:], like.dtype, like.device
        self._stream = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._staging: list[Tensor] = [torch.empty(0)] * (1 if self._stream is None else 2)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, read: Read, places: Tensor, keys: Tensor, values: Tensor, into: Tensor) -> tuple[int, float]:
        """Copy blocks to the compute device.

        Args:
            read: reads blocks from the slower tier.
            places: (n,), of the blocks.
            keys, values: (m, ℓ, d), on the compute device; they get the blocks.
            into: (n,), the rows of keys and values for the blocks.

        Returns the bytes moved, and the seconds that this thread waited, or the GPU for earlier copies.
        """
        started = time.perf_counter()
        if self._stream is None:
            blocks = self._read(read, places)
            keys.index_copy_(0, into, blocks[:, 0])
            values.index_copy_(0, into, blocks[:, 1])
            return blocks.nbytes, time.perf_counter() - started
        if (copied := self._copied[0]) is not None:
            copied.synchronize()
        waited = time.perf_counter() - started
        blocks = self._read(read, places)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = blocks.to(self._device, non_blocking=True)
            self._stream.wait_stream(computing)  # earlier work may still read the blocks that are overwritten
            keys.index_copy_(0, into, moved[:, 0])
            values.index_copy_(0, into, moved[:, 1])
            copied = torch.cuda.Event(enable_timing=True)
            copied.record(self._stream)
        for used in (keys, values, into):
            used.record_stream(self._stream)
        reached = torch.cuda.Event(enable_timing=True)
        reached.record(computing)
        computing.wait_event(copied)
        self._waits.append((reached, copied))
        self._copied = [self._copied[1], copied]
        self._staging.reverse()
        return blocks.nbytes, waited + self._gpu_waited()

    def _read(self, read: Read, places: Tensor) -> Tensor:
        """Blocks (n, 2, ℓ, d) on the CPU, in a buffer that is used again, because allocating memory is slow."""
        width = 2 * self._block.numel()
        if len(self._staging[0]) < len(places):
            pinned = self._stream is not None
            self._staging[0] = new_buffer(len(places), width, dtype=self._dtype, pinned=pinned)
        return read(places, self._staging[0][: len(places)]).view(-1, 2, *self._block)

    def _gpu_waited(self) -> float:
        """Seconds that the GPU waited for copies that are complete and not yet counted."""
        over = [pair for pair in self._waits if all(event.query() for event in pair)]
        self._waits = [pair for pair in self._waits if pair not in over]
        return sum(max(0.0, reached.elapsed_time(copied)) / 1e3 for reached, copied in over)
