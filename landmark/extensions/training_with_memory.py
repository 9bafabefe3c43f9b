"""Training with a memory (`train.local`): a window is read in chunks, whose queries retrieve from its earlier blocks.
What is in memory carries no gradient, so backward can be called on a chunk's loss before the next is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import Tensor

    from landmark.memory import Memory
    from landmark.models import Decoder
    from landmark.utils.window_batch import WindowBatch

SETTINGS = ("train.local",)


def losses(model: Decoder, batch: WindowBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Summed loss in nats, and number of targets, of each chunk of `batch.local` tokens without landmarks."""
    assert batch.local is not None
    memory = cast("Memory", model.new_memory(k=batch.top_k))
    memory.has_gradient = True  # of the chunk's queries, keys and values; blocks carry none
    yield from model.losses_of_chunks(batch, batch.local, memory)
