"""A block is found by its best token: the highest score of all its keys. A ceiling, which reads them all."""

from dataclasses import dataclass

from torch import Tensor

from landmark.memory.blocks.scorers import exact


@dataclass(frozen=True)
class Scorer(exact.Scorer):
    """Summaries are the keys (C, n, ℓ, d)."""

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        return exact.scores_of_keys(queries, summaries, softcap).amax(-1)
