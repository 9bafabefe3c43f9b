"""Offset keys: in some channels a token's key is the key of the normal token before it.

A query that matches these channels finds the token *after* an earlier occurrence, which is what copying needs; with
plain keys it takes two layers that learn together. Landmarks keep their own keys and are passed over. With ℓ = 2,
landmarks L, and the channels of the offset below the others::

    tokens              a b L c d L e
    key, own channels   a b L c d L e
    key, offset         a a L b c L d

The first token of a text, and of a training window, has no token before it and keeps its own key. Queries and values
stay as they are, so attention itself needs no change. Sources: PartialKeyOffset of modded-nanogpt (record of
2025-12-14); Olsson et al. 2022 for the induction heads that two layers learn otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def offset_keys(
    k: Tensor,
    channels: int,
    is_landmark: Tensor | None = None,
    previous: Tensor | None = None,
    empty: Tensor | None = None,
) -> Tensor:
    """Keys whose last channels are those of the normal token before.

    Args:
        k: (B, H, T, d), not rotated.
        channels: number of these channels, the last ones; 0 returns k itself.
        is_landmark: (B or 1, T), bool; None: there are no landmarks.
        previous: (B, H, 1, channels), of the last normal token before k, as `last_channels` returns; None: k begins a
            text, whose first normal token keeps its own key.
        empty: (B, T), bool, places without a token, which are passed over; together with is_landmark. None: there are
            none.

    Returns (B, H, T, d).
    """
    if channels == 0:
        return k
    own = k[..., -channels:]
    if empty is not None and is_landmark is not None:
        return torch.cat([k[..., :-channels], _of_token_before(own, ~(is_landmark | empty), previous)], -1)
    one_back = torch.cat([own[:, :, :1] if previous is None else previous, own[:, :, :-1]], 2)
    shifted = one_back
    if is_landmark is not None:
        first = own[:, :, :2] if previous is None else previous.expand(-1, -1, 2, -1)
        two_back = torch.cat([first, own[:, :, :-2]], 2)[:, :, : own.shape[2]]
        follows = F.pad(is_landmark[:, :-1], (1, 0))
        shifted = torch.where(follows[:, None, :, None], two_back, one_back)
        shifted = torch.where(is_landmark[:, None, :, None], own, shifted)
    return torch.cat([k[..., :-channels], shifted], -1)


def _of_token_before(own: Tensor, is_token: Tensor, previous: Tensor | None) -> Tensor:
    """For each token the channels of the one before, other places as they are.

    Args:
        own: (B, H, T, channels).
        is_token: (B, T), bool.
        previous: as in `offset_keys`.
    """
    places = torch.arange(own.shape[2], device=own.device)
    latest = torch.where(is_token, places, -1).cummax(1).values
    before = F.pad(latest[:, :-1], (1, 0), value=-1)  # −1: `previous`
    source = torch.where(is_token & (before >= 0), before, places)
    shifted = own.gather(2, source[:, None, :, None].expand(own.shape))
    if previous is None:
        return shifted
    follows = is_token & (before < 0)
    return torch.where(follows[:, None, :, None], previous, shifted)


def last_channels(k: Tensor, channels: int, after: int = 0) -> Tensor:
    """The last normal token's part of k, (B, H, 1, channels): the `previous` of the keys that follow k.

    k, channels: as in `offset_keys`. after: keys of a landmark and of empty places after it.
    """
    at = k.shape[2] - 1 - after
    return k[:, :, at : at + 1, k.shape[-1] - channels :]
