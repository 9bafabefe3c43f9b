"""Read a text once, and record the blocks that every token retrieves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from landmark.memory.retrievals import Retrieval
from landmark.memory.text_memory import Observable
from landmark.models import LanguageModel
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.errors import UserError

NO_BLOCK = 0xFFFF  # in place of a block number
MAX_RETRIEVALS = 1 << 24  # of a page: blocks, counted for each token and head


@dataclass(frozen=True)
class Trace:
    """The retrievals of L layers with H heads for a text of N tokens (T with landmarks), at most k blocks each.

    tokens: (N,) ids. width: positions of a block, ℓ+1, or ℓ without landmarks. chunks: position (landmarks included)
    where each begins. visible: for each the first position before it that is seen without retrieval. blocks: (L, H, k,
    T) uint16, oldest first, NO_BLOCK for none. weights: (L, H, k, T) float32, shares of the query's attention.
    cmt_weights: (L, H, T) float32, None without a context miss token. losses: (N − 1,) float32, nats of each token but
    the first.
    """

    tokens: np.ndarray
    block_size: int
    width: int
    chunks: list[int]
    visible: list[int]
    blocks: np.ndarray
    weights: np.ndarray
    cmt_weights: np.ndarray | None
    losses: np.ndarray


def trace_retrieval(
    model: LanguageModel,
    tokens: np.ndarray,
    local: int = DEFAULT_CHUNK,
    *,
    k: int = 4,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Trace:
    """Read a text (N,) with a new memory. local: tokens of a chunk; without landmarks those of a block. settings:
    further ones of `Memory`. Raises UserError for a model without blocks, and for a text too short or too long for a
    page.
    """
    block_size = _check_model(model, k)
    recorder = _Recorder()
    memory: Any = model.new_memory(k=k, **settings, observer=recorder)
    inner: Observable = getattr(memory, "memory", memory)  # a cache of transformers has one
    local = inner.observe(local)
    _check_text(model, inner, len(tokens), local, k)
    recorder.expect(model, k, len(tokens) + (inner.width - block_size) * (len(tokens) // block_size))
    text = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(next(model.parameters()).device)
    chunks, visible, losses = [], [], []
    for start in range(0, len(text), local):
        chunks.append(inner.position)
        visible.append(inner.visible_from)
        targets = text[start + 1 : start + local + 1]
        with torch.no_grad():
            logits = model(text[None, start : start + local], memory=memory)[0, : len(targets)]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses.append(F.cross_entropy(logits, targets, reduction="none").float().cpu())
        if progress is not None:
            progress(min(start + local, len(text)), len(text))
    read = recorder.blocks, recorder.weights, recorder.cmt_weights, torch.cat(losses).numpy()
    return Trace(tokens, block_size, inner.width, chunks, visible, *read)


class _Recorder:
    """An observer of a memory (see `landmark.memory.retrievals`) that records all retrievals of one sample."""

    def expect(self, model: LanguageModel, k: int, length: int) -> None:
        """Get ready for a text of T positions."""
        shape = model.config.num_layers, model.config.num_heads
        self.blocks = np.full((*shape, k, length), NO_BLOCK, dtype=np.uint16)
        self.weights = np.zeros((*shape, k, length), dtype=np.float32)
        self.cmt_weights = np.zeros((*shape, length), dtype=np.float32) if model.config.cmt else None

    def __call__(self, retrieval: Retrieval) -> None:
        layer, start = retrieval.layer, retrieval.position
        if self.cmt_weights is not None and retrieval.cmt_weight is not None:
            cmt_weights = retrieval.cmt_weight[0].float().cpu().numpy()
            self.cmt_weights[layer, :, start : start + cmt_weights.shape[1]] = cmt_weights
        ages, weights = (x[0].movedim(-1, 1).cpu() for x in retrieval.per_query())  # (H, q, T)
        is_read, place = ages > 0, np.s_[layer, :, : ages.shape[1], start : start + ages.shape[2]]
        self.blocks[place] = torch.where(is_read, retrieval.store.added - ages, NO_BLOCK).numpy()
        self.weights[place] = torch.where(is_read, weights.float(), 0.0).numpy()


def _check_model(model: LanguageModel, k: int) -> int:
    """The model's block size. Raises UserError if nothing can be retrieved."""
    shape = model.config
    if shape.kind != "landmark" or shape.block_size is None:
        raise UserError(f"task=inspect: a {shape.kind} has no blocks to retrieve: name the run of a landmark model")
    if k == 0:
        raise UserError("retrieval.k=0: nothing is retrieved, so there is nothing to see")
    return shape.block_size


def _check_text(model: LanguageModel, memory: Observable, count: int, local: int, k: int) -> None:
    """Raise UserError where no token of the text retrieves, and where a page cannot show all that is retrieved."""
    shape = model.config
    assert shape.block_size is not None
    before = -(-(shape.block_size + memory.window) // local) * local  # tokens before the first block
    if count <= before:
        raise UserError(
            f"task=inspect: in a text of {count:,} tokens, read {local} at a time (eval.local), nothing is retrieved: "
            f"give one of more than {before:,}, or lower eval.local"
        )
    most = min(MAX_RETRIEVALS // (shape.num_layers * shape.num_heads * k), NO_BLOCK * shape.block_size)
    if count + (memory.width - shape.block_size) * (count // shape.block_size) > most:
        raise UserError(
            f"task=inspect: the text has {count:,} tokens, a page holds {most:,}, landmarks included, of this model "
            f"with retrieval.k={k}: give a part of it"
        )
