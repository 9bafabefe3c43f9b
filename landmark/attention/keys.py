"""Keys, as attention gets them from a layer's projection: the same for training windows and for the memory.

1. *Offset*: in some channels a token's key is the key of the normal token before it. A query that matches these
   channels finds the token *after* an earlier occurrence, which is what copying needs; with plain keys it takes two
   layers that learn together (Olsson et al. 2022). Landmarks keep their own keys and are passed over. The first
   token of a text, or of a training window, keeps its own key. Source: PartialKeyOffset of modded-nanogpt (record of
   2025-12-14). With ℓ = 2, landmarks L, and the channels of the offset below the others::

       tokens              a b L c d L e
       key, own channels   a b L c d L e
       key, offset         a a L b c L d

2. *Positions*: rotary, or none in some layers (rotary.py).
3. *Landmark*: its own key alone ("token", as in the paper), or plus the mean of the keys of its block, rotated
   ("mean"). A block should weigh as much as its tokens do together in full attention, exp(L) with L the log-sum-exp of
   their scores; L ≥ Σ (q·k_i/√d) / ℓ + log ℓ, with equality for equal scores. The mean key gives the first term, and
   `model.landmark_bias` begins with the second. A gate that adds a part α of L leaves 1 − α of both (`share`).

A bias is carried by the last channel, which positions do not turn: there queries are 1, keys 0, landmarks the bias.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention.layout import blocks_and_landmarks
from landmark.attention.rotary import RotaryTable
from landmark.utils.constants import channels_of
from landmark.utils.window_batch import most_blocks


class Keys:
    """How the keys of a model are made.

    offset: fraction of a head's channels, the last ones, with the key of the normal token before. landmark: "token"; or
    "mean" for one whose key has the mean of its block added. rope_base: base of the rotary positions; or (d/2,),
    radians per position of each pair. unrotated_layers: layers whose queries and keys have no positions. width: W of
    blocks whose landmarks take no position; None: they take one, as in the paper.
    """

    def __init__(
        self,
        offset: float = 0.0,
        landmark: str = "token",
        rope_base: float | Tensor = 10000.0,
        unrotated_layers: Collection[int] = (),
        width: int | None = None,
    ):
        self.offset, self.landmark, self.rope_base, self.width = offset, landmark, rope_base, width
        self.unrotated_layers = frozenset(unrotated_layers)
        self._rotary, self._unrotated = RotaryTable(rope_base, width), RotaryTable(torch.zeros(1))

    def rotary(self, layer: int) -> RotaryTable:
        """The rotary factors of a layer."""
        return self._unrotated if layer in self.unrotated_layers else self._rotary

    def shifted(self, k: Tensor, is_landmark: Tensor | None = None, previous: Tensor | None = None) -> Tensor:
        """Keys (B, H, T, d), not rotated, whose last channels are those of the normal token before.

        is_landmark: (B or 1, T), bool; None: none is. previous: (B, H, 1, channels), as `last` returns it of the token
        before k; None: k begins a text, whose first normal token keeps its own key.
        """
        channels = channels_of(self.offset, k.shape[-1])
        if channels == 0:
            return k
        own = k[..., -channels:]
        one_back = torch.cat([own[:, :, :1] if previous is None else previous, own[:, :, :-1]], 2)
        shifted = one_back
        if is_landmark is not None:
            first = own[:, :, :2] if previous is None else previous.expand(-1, -1, 2, -1)
            two_back = torch.cat([first, own[:, :, :-2]], 2)[:, :, : own.shape[2]]
            follows = F.pad(is_landmark[:, :-1], (1, 0))
            shifted = torch.where(follows[:, None, :, None], two_back, one_back)
            shifted = torch.where(is_landmark[:, None, :, None], own, shifted)
        return torch.cat([k[..., :-channels], shifted], -1)

    def last(self, k: Tensor, after: int = 0) -> Tensor | None:
        """The part of the last normal token's key that the next token takes, (B, H, 1, channels); None: no offset.

        after: landmarks, at most one, behind that token.
        """
        channels = channels_of(self.offset, k.shape[-1])
        at = k.shape[2] - 1 - after
        return k[:, :, at : at + 1, k.shape[-1] - channels :] if channels else None

    def with_means(self, blocks: Tensor, share: float = 1.0) -> Tensor:
        """Complete blocks (…, n, W, d) of rotated keys, the landmark last, with `share` of the mean added to it."""
        if self.landmark != "mean":
            return blocks
        tokens, landmark = blocks[..., :-1, :], blocks[..., -1:, :]
        return torch.cat([tokens, torch.add(landmark, tokens.mean(-2)[..., None, :], alpha=share)], -2)


class WindowBlocks(NamedTuple):
    """Which tokens of a window belong to which block, for means of keys; the same for all layers. Each (B, blocks, T).

    average: 1 / the number of normal tokens of the block. landmark: 1 at the landmark that closes it.
    """

    average: Tensor
    landmark: Tensor

    @staticmethod
    def of(phase: Tensor, length: int, block_size: int, like: Tensor) -> "WindowBlocks":
        """The blocks of a window. phase: (B or 1,). like: a tensor with the keys' type and device."""
        block, is_landmark = blocks_and_landmarks(phase.to(like.device), length, block_size)
        blocks = torch.arange(most_blocks(length, block_size), device=like.device)
        belongs = block[:, None] == blocks[:, None]
        normal = belongs & ~is_landmark[:, None]
        average = normal.to(like.dtype) / normal.sum(-1, keepdim=True).clamp(min=1)
        return WindowBlocks(average, (belongs & is_landmark[:, None]).to(like.dtype))

    def add_means(self, k: Tensor, share: float = 1.0) -> Tensor:
        """Keys (B, H_kv, T, d), rotated, with `share` of the mean of its block added to each landmark."""
        return torch.add(k, self.landmark.transpose(1, 2)[:, None] @ (self.average[:, None] @ k), alpha=share)


def bias_landmarks(q: Tensor, k: Tensor, is_landmark: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys that add a bias (H_kv,) to the scores, divided by √d, of landmarks, by their last channel.

    is_landmark: (B or 1, T), bool; None: none of them is.
    """
    if is_landmark is None:
        return F.pad(q[..., :-1], (0, 1), value=1.0), F.pad(k[..., :-1], (0, 1))
    last = k.new_zeros(k.shape[-1])
    last[-1] = 1  # made on the device: nothing is copied to it
    at_landmarks = is_landmark[:, None, :, None] * (bias * k.shape[-1] ** 0.5)[:, None, None]
    return torch.addcmul(last, q, 1 - last), torch.addcmul(k * (1 - last), at_landmarks.to(k.dtype), last)
