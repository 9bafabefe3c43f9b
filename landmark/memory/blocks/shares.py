"""How much of their attention tokens give to each block of a text, be it one that they read or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from landmark.attention import Scoring, Sinks
from landmark.attention.scoring import capped
from landmark.memory.blocks.cache import BlockCache

TOGETHER = 128  # blocks whose scores are computed together
SINK = 4  # first tokens of a text, to which every token attends whatever they say (Xiao et al. 2023)


class InPlace:
    """Stands in the place of a cache of blocks, whose attributes it has, and sees what every layer asks of it."""

    def __init__(self, memory: BlockCache):
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def token_kernels(self, device: torch.device, layers: int) -> None:
        """None: a CUDA graph would not ask."""


class AttentionProbe(InPlace):
    """A cache of blocks that is read as ever, and in each layer is asked once more: for the scores of all keys.

    Where the text is longer than the model's positions, all blocks are scored as if they stood in the last of the k + 1
    places before the text's end.
    """

    def __init__(self, memory: BlockCache, blocks: int, tokens: range, starts: Sequence[int] = ()):
        """blocks: the first ones, all complete, whose shares are wanted. tokens: positions behind them that ask.
        starts: first positions of texts; the share of the SINK tokens there counts for no block.
        """
        super().__init__(memory)
        self._blocks, self._tokens = blocks, tokens
        self._sinks = {at // memory.block_size: at % memory.block_size for at in starts}
        self._sums: dict[int, Tensor] = {}  # by layer (H, blocks)

    def shares(self) -> Tensor:
        """(layers, H, blocks), float32: of the attention of each head, a mean over the tokens that ask."""
        return torch.stack([each.cpu() for _, each in sorted(self._sums.items())]) / len(self._tokens)

    def attend_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """As of `BlockCache`."""
        out, start = self.memory.attend_in(layer, q, k, v, scoring, sinks), self.memory.position
        first, stop = (max(0, min(q.shape[2], at - start)) for at in (self._tokens.start, self._tokens.stop))
        if first < stop:
            found = self._shares_of(layer, q[0, :, first:stop], start + first, scoring)
            self._sums[layer] = found if layer not in self._sums else self._sums[layer] + found
        return out

    def _shares_of(self, layer: int, q: Tensor, start: int, scoring: Scoring) -> Tensor:
        """Sums (H, blocks) of the shares of queries (H, T, d), the first of which is at position `start`."""
        memory, length, size = self.memory, q.shape[1], self.memory.block_size
        keys, end, behind = memory.layers[layer].keys, start + length, self._blocks * size
        rows = q.float().unflatten(0, (len(keys), -1)).flatten(1, 2) * scoring.scale_of(q.shape[2])  # (C, G·T, d)
        own = capped(rows @ keys[:, behind:end].to(q.device).float().mT, scoring.softcap)
        later = torch.ones(length, end - behind, dtype=torch.bool, device=q.device).triu(start - behind + 1)
        scores = [own.unflatten(1, (-1, length)).masked_fill(later, -torch.inf).logsumexp(-1, keepdim=True)]
        rotation = memory.part_at(layer, start, q.device.type).rotation
        if rotation is not None:
            rows = rotation(rows, torch.tensor([-behind], device=q.device))
        for first in range(0, self._blocks, TOGETHER):
            numbers = torch.arange(first, min(first + TOGETHER, self._blocks), device=q.device)
            part = keys[:, first * size : (first + len(numbers)) * size].to(q.device).unflatten(1, (-1, size))
            if rotation is not None:
                part = rotation(part, -(numbers + memory.k + 1) * size)
            found = capped(rows @ part.flatten(1, 2).float().mT, scoring.softcap).unflatten(-1, (-1, size))
            for block in self._sinks.keys() & set(range(first, first + len(numbers))):
                sink = found[:, :, block - first, self._sinks[block] : self._sinks[block] + SINK]
                scores[0] = torch.logaddexp(scores[0], sink.logsumexp(-1, keepdim=True).unflatten(1, (-1, length)))
                sink.fill_(-torch.inf)
            scores.append(found.logsumexp(-1).unflatten(1, (-1, length)))
        return torch.cat(scores, -1).softmax(-1)[..., 1:].sum(2).flatten(0, 1)
