"""Which blocks a query reads: what all selectors have in common, and the paper's (Sections 3.2 and 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from landmark.memory.layer import Question
from landmark.memory.select.scores import best_of_summaries
from landmark.memory.store.block_store import Summary


class Selector:
    """Chooses the blocks that the queries of a chunk read, in every layer.

    granularity: "per_token_and_head": each query of each head has its own set of retrieved blocks;
        "per_token_and_group": the heads that share keys share a set; "per_token": all heads share a set; "per_head":
        the queries of a chunk share a set.
    newest: of the k blocks so many are the newest, whatever they score.
    summaries: what a store must have of each block besides keys, values and landmark, and makes of its keys, by name.
    """

    granularity: str
    newest: int = 0
    summaries: Mapping[str, Summary] = MappingProxyType({})

    def choose(self, question: Question, k: int) -> Tensor:
        """The ages of k blocks for each query, oldest first, or of all if there are fewer; 1 is the newest block.

        Returns (B, H, H_kv or 1, n or 1, q), int64, at least one block: 1 where heads, or queries, choose together.
        Among equal scores the newer blocks are chosen.
        """
        raise NotImplementedError

    def check_samples_can_be_selected(self) -> None:
        """Raise UserError where what the selector notes is of all samples of a batch together."""


@dataclass(frozen=True)
class Best(Selector):
    """Reads the k blocks whose landmark has the highest score.

    tied_layers: layers in which all landmarks are the same vector up to rounding, so that all blocks older than the
        last k have the same score; there the newer ones are taken. With stingy positions only, which make it so.
    """

    granularity: str = "per_token_and_head"
    tied_layers: tuple[int, ...] = (0,)
    newest: int = 0

    def is_tied(self, question: Question) -> bool:
        """Whether all older blocks have the same score."""
        return question.layer in self.tied_layers and question.lags.own > 0

    def choose(self, question: Question, k: int) -> Tensor:
        landmarks, is_tied = question.store.landmarks, self.is_tied(question)
        return best_of_summaries(question, k, landmarks, self.granularity, self.newest, is_tied)
