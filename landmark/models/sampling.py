"""Drawing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Raises UserError for a setting out of range.

    Args:
        temperature: divides the logits; 0: the most probable token is chosen.
        top_k: number of the most probable tokens among which one is drawn (None: all).
        top_p: tokens are drawn among the most probable ones that together have this probability, at least one.
        seed: with a prompt's number it seeds the prompt's own random numbers, which do not depend on other prompts.
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
        """The random numbers for the prompt with this number."""
        entropy = np.random.SeedSequence([self.seed, prompt]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0] >> np.uint64(1)))

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token. logits: (V,). Of equally probable tokens the lower id comes first."""
        if self.temperature == 0:
            return int(logits.argmax())
        ordered, tokens = logits.double().cpu().sort(descending=True, stable=True)
        probabilities = (ordered[: self.top_k] / self.temperature).softmax(0)
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities * (before < self.top_p)
        return int(tokens[probabilities.multinomial(1, generator=generator)])
