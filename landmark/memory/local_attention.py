"""Attention of a chunk to itself and to the pending tokens before it, and how their keys are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from landmark.attention import landmark_attention
from landmark.attention.flash import attention_forward
from landmark.attention.key_offset import last_channels, offset_keys
from landmark.attention.landmark_keys import add_summaries, block_weights
from landmark.attention.rotary import RotaryTable, rotate
from landmark.memory.hierarchy import Descent
from landmark.memory.layer import LayerMemory
from landmark.utils.channels import channels_of


@dataclass(frozen=True)
class LocalAttention:
    """The first step of `landmark.memory.Memory.attend`.

    Args: block_size, key_offset, landmark_key, local_blocks, softcap and joint_softmax are those of the memory.
    """

    block_size: int
    key_offset: float
    landmark_key: str
    local_blocks: int
    softcap: float | None
    joint_softmax: float

    def offset(self, state: LayerMemory, k: Tensor, pending: int, empty: Tensor | None) -> Tensor:
        """A chunk's keys, some channels from the normal token before; those of its last token are kept for the next.

        Args:
            state: the layer's.
            k: (B, H_kv, T, d), not rotated.
            pending: number of pending tokens before the first key.
            empty: (1, T), bool, places without a token; None: there are none.
        """
        channels = channels_of(self.key_offset, k.shape[-1])
        if channels == 0:
            return k
        end, width, is_landmark = pending + k.shape[2], self.block_size + 1, None
        if end // width > pending // width:
            is_landmark = torch.arange(pending, end, device=k.device)[None] % width == self.block_size
        previous, after = state.last_key, int(end % width == 0)
        if after and empty is not None:  # the landmark, and the empty places before it
            after = 1 + int((empty[0, :-1].flip(0).cumsum(0) == torch.arange(1, k.shape[2], device=k.device)).sum())
        if k.shape[2] > after:
            state.last_key = last_channels(k, channels, after).detach()
        return offset_keys(k, channels, is_landmark, previous, empty)

    def attend(
        self,
        state: LayerMemory,
        rotary: RotaryTable,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pending: int,
        descent: Descent | None,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, T, d) and log-sum-exp (B, H, T) of attention to the chunk and the pending tokens.

        Args:
            state: the layer's.
            rotary: its rotary positions.
            q: (B, H, T, d), not rotated.
            k, v: (B, H_kv, pending + T, d), k not rotated.
            pending: number of pending tokens before the first query.
            descent: of a hierarchy of landmarks; None: there are no groups.
            backend: of landmark attention, not "auto".
        """
        factors = rotary(0, k.shape[2], q)
        q, k = rotate(q, factors[pending:]), rotate(k, factors)
        width = self.block_size + 1
        full = k.shape[2] // width * width
        if self.landmark_key != "token" and full:
            blocks = k[:, :, :full].unflatten(2, (-1, width))
            if self.landmark_key == "pooled":
                state.weights = self._pool(state, q, blocks, pending)
            sizes = self.sizes(state, full // width)
            summarised = add_summaries(blocks, state.weights, sizes, 1 - self.joint_softmax)
            k = torch.cat([summarised.flatten(2, 3), k[:, :, full:]], 2)
        scale = 1 / math.sqrt(q.shape[-1])
        is_local = k.shape[2] <= width * (self.local_blocks + 1)
        seen, total = (tokens - tokens // width for tokens in (pending + 1, k.shape[2]))
        if state.empty is not None:
            total -= int(state.empty.sum())
        if backend != "triton" and is_local and seen == total:
            # While generating, all queries see the same normal tokens, and no landmark.
            normal = slice(total)
            if k.shape[2] > width:
                normal = (torch.arange(k.shape[2], device=k.device) % width != self.block_size).nonzero()[:, 0]
            k, v = k[:, :, normal], v[:, :, normal]
            if (group := q.shape[1] // k.shape[1]) > 1:
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            return attention_forward(q, k, v, scale=scale, softcap=self.softcap)
        settings = {"block_size": self.block_size, "prefix": pending, "scale": scale, "backend": backend}
        settings |= {"local_blocks": self.local_blocks, "softcap": self.softcap, "empty": state.empty}
        gates = None if descent is None else descent.local_gates(q, k, self.block_size, pending)
        settings |= {"gates": gates, "joint_softmax": self.joint_softmax}
        return landmark_attention(q, k, v, **settings, return_lse=True)

    def _pool(self, state: LayerMemory, q: Tensor, blocks: Tensor, pending: int) -> Tensor:
        """The weights of the tokens of all complete blocks in pooled keys; those of pending blocks are known already.

        Args:
            state: the layer's.
            q: (B, H, T, d), rotated queries of the chunk.
            blocks: (B, H_kv, n, W, d), rotated keys.
            pending: number of pending tokens before the first query.
        """
        width, known = self.block_size + 1, pending // (self.block_size + 1)
        if known == blocks.shape[2]:
            assert state.weights is not None
            return state.weights
        first = known * width + self.block_size - pending
        weights = block_weights(q[:, :, first : blocks.shape[2] * width - pending : width], blocks[:, :, known:])
        return weights if state.weights is None else torch.cat([state.weights, weights], 2)

    def sizes(self, state: LayerMemory, count: int) -> Tensor | None:
        """The tokens of the first `count` complete blocks of pending tokens and chunk, (count,); None: all have ℓ."""
        if state.empty is None:
            return None
        width = self.block_size + 1
        return self.block_size - state.empty[0, : count * width].view(count, width).sum(1)
