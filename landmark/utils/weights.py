"""A short string that tells models with different weights apart."""

from __future__ import annotations

import hashlib

from torch import nn


def weights_digest(model: nn.Module) -> str:
    """Hex SHA-256 of the name, the shape and about 64 numbers of each weight.

    Of a weight that is kept elsewhere (a meta tensor), the name and the shape alone.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if not weight.is_meta:
            some = weight.detach().flatten()[:: max(1, weight.numel() // 64)].double().cpu()
            digest.update(f" {some.tolist()}".encode())
    return digest.hexdigest()
