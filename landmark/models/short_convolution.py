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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.memory.carried import CarriedStates

AddEarlier = Callable[[Tensor, Tensor], Tensor]


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

    def __init__(self, is_landmark: Tensor | None, tokens: int, carried: CarriedStates | None = None):
        """Find the places.

        Args:
            is_landmark: (B or 1, tokens + T), bool, of the window and of the places before it, where their flags do
                not matter in a text's first window; at least tokens − 1 normal tokens between two of them. None:
                there are no landmarks.
            tokens: that a result is the sum of, itself included.
            carried: of the memory that the chunk continues; None: nothing is before a window.
        """
        self._tokens, self._carried, self._landmark_since = tokens, carried, None
        if is_landmark is not None:
            places = is_landmark[:, :-1].unfold(1, tokens, 1)  # the ones before each place
            self._landmark_since = [places[..., tokens - n :].any(-1, keepdim=True) for n in range(tokens + 1)]

    def add(self, layer: int, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """Hidden states (B, T, channels) plus the weighted ones of the tokens before.

        Args:
            layer: number of the layer.
            name: of the convolution in it.
            x: (B, T, channels).
            weight: (tokens − 1, channels), of one token back first.
        """
        name, before = f"{layer}.{name}", self._tokens
        carried = None if self._carried is None else self._carried.take(name)
        whole = F.pad(x, (0, 0, before, 0)) if carried is None else torch.cat([carried, x], 1)
        if self._carried is not None:
            self._carried.keep(name, whole[:, -before:].detach().clone())  # a view would keep the whole chunk
        weight = F.pad(weight, (0, 0, 1, 1))  # from 0 tokens back, which are in x itself, to one too many
        out = x
        for back in range(1, before + (self._landmark_since is not None)):
            out = torch.addcmul(out, whole[:, before - back : whole.shape[1] - back], self._weight(weight, back))
        return out

    def _weight(self, weight: Tensor, back: int) -> Tensor:
        """Of the place so many places back, which with a landmark behind it holds one token less back."""
        if self._landmark_since is None:
            return weight[back]
        nearer, there_or_nearer = self._landmark_since[back - 1], self._landmark_since[back]
        return torch.where(nearer, weight[back - 1], torch.where(there_or_nearer, 0, weight[back]))
