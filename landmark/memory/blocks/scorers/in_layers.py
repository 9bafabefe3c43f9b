"""A rule in some layers, and mean keys in the others.

In Qwen 2.5 Coder 0.5B rules that come nearer to the exact share of attention hurt in the first half of the layers, and
help in the second (experiments/equal_keys).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from landmark.memory.blocks.scorer import BlockScorer, scorer_of
from landmark.memory.blocks.scorers.mean_key import Scorer as MeanKey


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """rule: a name, as of `retrieval.scorer`, of the layers `first` to `last` (None: the model's last)."""

    rule: str
    first: int
    last: int | None = None

    @cached_property
    def _inside(self) -> BlockScorer:
        return scorer_of(self.rule)  # asked for in each layer, for each token

    def in_layer(self, layer: int) -> BlockScorer:
        is_inside = self.first <= layer and (self.last is None or layer <= self.last)
        return self._inside.in_layer(layer) if is_inside else MeanKey()

    def check_model(self, digest: Callable[[], str | None], block_size: int) -> None:
        self._inside.check_model(digest, block_size)
