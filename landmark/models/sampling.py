"""How the next token is drawn from logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Settings of a draw. Raises UserError where one is out of range.

    Args:
        temperature: the logits are divided by it; 0 takes the most probable token.
        top_k: only so many of the most probable tokens can be drawn (None: all).
        top_p: only the most probable tokens that together have this probability can be drawn, at least one.
        seed: each prompt has a generator of its own, made of the seed and the prompt's number, so that its draws do
            not depend on other prompts.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise UserError(f"generate.temperature={self.temperature}: must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"generate.top_k={self.top_k}: must be at least 1")
        if not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p={self.top_p}: must be above 0 and at most 1")

    def generator(self, prompt: int) -> torch.Generator:
        """The generator of random numbers for the prompt of this number."""
        entropy = np.random.SeedSequence([self.seed, prompt]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0] >> np.uint64(1)))

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token by its logits (V,). Equally probable tokens are ordered by id."""
        if self.temperature == 0:
            return int(logits.argmax())
        ordered, tokens = logits.double().cpu().sort(descending=True, stable=True)
        probabilities = (ordered[: self.top_k] / self.temperature).softmax(0)
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities * (before < self.top_p)
        return int(tokens[probabilities.multinomial(1, generator=generator)])
