"""Short convolutions: before attention and perceptron each channel of a token gets a sum of the tokens just before.

What a query looks for, and what a key says, are then groups of several tokens, which attention alone makes in two
layers. The token itself has weight 1 and those before it 0 at the start, so that a new model is the one without
convolutions. Landmarks are passed over, and get those of the last tokens of their block. With ℓ = 2, landmarks L and
weights u, v of one and two tokens back::

    places      a      b        L          c          d
    results     a   b + u·a  L + u·b     c + u·b    d + u·c
                               + v·a       + v·a      + v·b

Sources: Fu et al. 2023 (H3) and Arora et al. 2024 (Zoology), where small models need them to recall; Allen-Zhu 2025
("Canon layers"), who adds them before attention and perceptron of a transformer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AddEarlier = Callable[[Tensor, Tensor], Tensor]


class Carries(Protocol):
    """What a memory keeps of a text between its chunks (`landmark.memory.carried`)."""

    def take(self, name: str) -> Tensor | None: ...
    def keep(self, name: str, states: Tensor) -> None: ...


class ShortConvolution(nn.Module):
    """The weights of the tokens before: (channels, 1, tokens − 1), of one token back first.

    Args of the constructor: channels, of a hidden state; tokens, that a result is the sum of, itself included.
    """

    def __init__(self, channels: int, tokens: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, tokens - 1))

    def forward(self, x: Tensor, add: AddEarlier) -> Tensor:
        """x: (B, T, channels) → (B, T, channels). add: `EarlierTokens.add` with the name of this convolution."""
        return add(x, self.weight[:, 0].T)


class EarlierTokens:
    """Which places of a window, or of a chunk of a text, hold the tokens before each one."""

    def __init__(self, is_landmark: Tensor | None, tokens: int, carried: Carries | None = None):
        """Find the places.

        Args:
            is_landmark: (B or 1, tokens + T), bool, of the window and of the places before it, where their flags do
                not matter in a text's first window; at least tokens − 1 normal tokens between two of them. None:
                there are no landmarks.
            tokens: that a result is the sum of, itself included.
            carried: the memory that the chunk continues; None: nothing is before a window.
        """
        self._before, self._carried = tokens, carried  # places before the window: tokens − 1, and one for a landmark
        self._passed: list[Tensor] | None = None
        if is_landmark is not None:
            near = is_landmark[:, 1:-1].unfold(1, tokens - 1, 1)  # the tokens − 1 places before each one
            self._passed = [near[..., tokens - 1 - n :].any(-1)[..., None] for n in range(1, tokens)]

    def add(self, layer: int, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """Hidden states (B, T, channels) plus the weighted ones of the tokens before.

        Args:
            layer: number of the layer.
            name: of the convolution in it.
            x: (B, T, channels).
            weight: (tokens − 1, channels), of one token back first.
        """
        name = f"{layer}.{name}"
        carried = None if self._carried is None else self._carried.take(name)
        whole = F.pad(x, (0, 0, self._before, 0)) if carried is None else torch.cat([carried, x], 1)
        if self._carried is not None:
            self._carried.keep(name, whole[:, -self._before :].detach())
        length, out = x.shape[1], x
        for places in range(
            1, self._before + 1
        ):  # a place n back holds the n-th token before, or behind a landmark n−1st
            start = self._before - places
            if (scale := self._scale(weight, places)) is not None:
                out = torch.addcmul(out, whole[:, start : start + length], scale)
        return out

    def _scale(self, weight: Tensor, places: int) -> Tensor | None:
        """What a place so many places back is multiplied by, (B or 1, T, channels) or (channels,); None: 0."""
        passed, last = self._passed, len(weight)
        if passed is None:
            return weight[places - 1] if places <= last else None
        scale = torch.where(passed[places - 1], 0, weight[places - 1]) if places <= last else None
        if places == 1:
            return scale
        of_passed = torch.where(passed[places - 2], weight[places - 2], 0)
        return of_passed if scale is None else scale + of_passed
