"""Greedy continuation of prompts, read in chunks with a memory."""

from __future__ import annotations

import torch
from torch import Tensor

from landmark.models.decoder import Decoder


@torch.no_grad()
def continue_greedily(model: Decoder, prompts: Tensor, tokens: int, local: int, memory) -> Tensor:
    """The most probable next token, one after the other.

    prompts: (B, T) raw ids, fed `local` at a time; memory: an empty one that fits the model. Returns (B, tokens).
    """
    logits = prompts.new_empty(0)
    for chunk in prompts.split(local, 1):
        logits = model(chunk, memory=memory, last=True)
    generated = [logits[:, -1].argmax(-1)]
    while len(generated) < tokens:
        logits = model(generated[-1][:, None], memory=memory, last=True)
        generated.append(logits[:, -1].argmax(-1))
    return torch.stack(generated, 1)
