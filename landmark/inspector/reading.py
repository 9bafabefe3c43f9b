"""A text is read once, and what every token looks up is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F

from landmark.memory import Memory
from landmark.memory.observer import Retrieval
from landmark.models import Decoder
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.errors import UserError

NONE = 0xFFFF  # in the place of a block's number
MOST = 1 << 24  # retrievals of a page, of one block by one head for one token


@dataclass(frozen=True)
class Reading:
    """What was retrieved for a text of N tokens, T with its landmarks, by L layers of H heads, at most k blocks each.

    tokens: (N,) ids. chunks: where in the stream each chunk begins. blocks: (L, H, k, T) uint16, numbers of blocks,
    counted from the first, oldest first, NONE where there is none. weights: (L, H, k, T) float32, the share of the
    query's attention that each gets. missed: (L, H, T) float32, the weight of the context miss token, if the model has
    one. losses: (N − 1,) float32, nats of each token but the first.
    """

    tokens: np.ndarray
    block_size: int
    chunks: list[int]
    blocks: np.ndarray
    weights: np.ndarray
    missed: np.ndarray | None
    losses: np.ndarray


def read(
    model: Decoder,
    tokens: np.ndarray,
    local: int = DEFAULT_CHUNK,
    *,
    k: int = 4,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Reading:
    """Read a text with a memory of its own.

    tokens: (N,) raw ids. local: of them fed at a time. k, settings: of `landmark.memory.Memory`. progress: called with
    tokens read, and in all. Raises UserError for a model without blocks, a text too short to look anything up, or too
    long for a page.
    """
    block_size = _check(model, tokens, local, k)
    observed = _Observed(model, k, len(tokens) + len(tokens) // block_size)
    # Of the ways to read blocks, "blockwise" tells their weights.
    memory = cast(Memory, model.new_memory(k=k, **settings, observer=observed, backend="blockwise"))
    text = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(next(model.parameters()).device)
    chunks, losses = [], []
    for start in range(0, len(text), local):
        chunks.append(memory.position)
        following = text[start + 1 : start + local + 1]
        with torch.no_grad():
            logits = model(text[None, start : start + local], memory=memory)[0, : len(following)]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, following, reduction="none").float().cpu())
        if progress is not None:
            progress(min(start + local, len(text)), len(text))
    return Reading(
        tokens, block_size, chunks, observed.blocks, observed.weights, observed.missed, torch.cat(losses).numpy()
    )


class _Observed:
    """An observer of a memory (see `landmark.memory.observer`) that keeps everything, of one sample."""

    def __init__(self, model: Decoder, k: int, length: int):
        shape = model.config.num_layers, model.config.num_heads
        self.blocks = np.full((*shape, k, length), NONE, dtype=np.uint16)
        self.weights = np.zeros((*shape, k, length), dtype=np.float32)
        self.missed = np.zeros((*shape, length), dtype=np.float32) if model.config.cmt else None

    def __call__(self, retrieval: Retrieval) -> None:
        layer, start = retrieval.layer, retrieval.position
        if self.missed is not None and retrieval.missed is not None:
            missed = retrieval.missed[0].float().cpu().numpy()
            self.missed[layer, :, start : start + missed.shape[1]] = missed
        ages, weights = (x[0].movedim(-1, 1).cpu() for x in retrieval.of_queries())  # (H, q, T)
        read, place = ages > 0, np.s_[layer, :, : ages.shape[1], start : start + ages.shape[2]]
        self.blocks[place] = torch.where(read, retrieval.store.added - ages, NONE).numpy()
        self.weights[place] = torch.where(read, weights.float(), 0.0).numpy()


def _check(model: Decoder, tokens: np.ndarray, local: int, k: int) -> int:
    """The model's block size. Raises UserError where there is nothing to see, or more than a page holds."""
    shape, count = model.config, len(tokens)
    if shape.kind != "landmark" or shape.block_size is None:
        raise UserError(f"task=inspect: a {shape.kind} has no blocks to retrieve, name the run of a landmark model")
    if k == 0:
        raise UserError("retrieval.k=0: nothing is retrieved, so there is nothing to see")
    chunks_before = -(-shape.block_size // local)  # the last of them completes the first block
    if count <= chunks_before * local:
        raise UserError(
            f"task=inspect: in a text of {count:,} tokens, read {local} at a time (eval.local), nothing is retrieved: "
            f"give one of more than {chunks_before * local:,}, or lower eval.local"
        )
    most = min(MOST // (shape.num_layers * shape.num_heads * k), NONE * shape.block_size)
    if count + count // shape.block_size > most:
        raise UserError(
            f"task=inspect: the text has {count:,} tokens, a page holds {most:,}, landmarks included, of this model "
            f"with retrieval.k={k}: give a part of it"
        )
    return shape.block_size
