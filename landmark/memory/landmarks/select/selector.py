"""Which blocks a query reads: the paper's selector (Sections 3.2 and 4.1), controls, and two that need no training.

Controls are the newest blocks, random ones, and those that are named beforehand. A memory helps where it beats them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from landmark.memory.landmarks.block_store import Summary, mean_keys
from landmark.memory.landmarks.layer import Question
from landmark.memory.landmarks.reading import weights_of_blocks
from landmark.memory.landmarks.select.scores import best_ages, best_in_order, best_of_summaries, newest_ages


class Selector:
    """Chooses the blocks that the queries of a chunk read, in every layer.

    granularity: "per_token_and_head": each query of each head has its own set of retrieved blocks;
        "per_token_and_group": the heads that share keys share a set; "per_token": all heads share a set; "per_head":
        the queries of a chunk share a set.
    summaries: what a store must have of each block besides keys, values and landmark, and makes of its keys, by name.
    """

    granularity: str
    summaries: Mapping[str, Summary] = MappingProxyType({})

    def choose(self, question: Question, k: int) -> Tensor:
        """The ages of k blocks for each query, oldest first, or of all if there are fewer; 1 is the newest block.

        Returns (B, H, H_kv or 1, T or 1, q), int64, at least one block: 1 where heads, or queries, choose together.
        Among equal scores the newer blocks are chosen.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Best(Selector):
    """Reads the k blocks whose landmark has the highest score.

    tied_layers: layers in which all landmarks are the same vector up to rounding, so that all blocks older than the
        last k have the same score; there the newer ones are taken. With stingy positions only, which make it so.
    """

    granularity: str = "per_token_and_head"
    tied_layers: tuple[int, ...] = (0,)

    def is_tied(self, question: Question) -> bool:
        """Whether all older blocks have the same score."""
        return question.layer in self.tied_layers and question.lags.own > 0

    def choose(self, question: Question, k: int) -> Tensor:
        return best_of_summaries(question, k, question.store.landmarks, self.granularity, self.is_tied(question))


@dataclass(frozen=True)
class Newest(Selector):
    """All queries read the k newest blocks."""

    granularity: str = "per_token_and_head"

    def choose(self, question: Question, k: int) -> Tensor:
        return newest_ages(question, k, self.granularity)


@dataclass(frozen=True)
class Random(Selector):
    """Each set of queries and heads reads k blocks, other ones in every layer and chunk. seed: of the numbers."""

    granularity: str = "per_token_and_head"
    seed: int = 0

    def choose(self, question: Question, k: int) -> Tensor:
        store, device = question.store, question.q.device
        if k >= len(store):
            return newest_ages(question, k, self.granularity)
        seed = hash((self.seed, question.position, question.layer)) & 0x7FFF_FFFF
        generator = torch.Generator(device).manual_seed(seed)
        scores = torch.rand(*question.sets(self.granularity), len(store), generator=generator, device=device)
        return best_ages(scores, store.ages(), k).sort(-1, descending=True).values


@dataclass
class Given(Selector):
    """All queries of a sample read the same blocks: those named, the newest first, then the newest others.

    numbers: (B, n), of these blocks in the text, from 0; those that are not stored do not count. None: they are set
    before the first retrieval.
    """

    granularity: str = "per_token_and_head"
    numbers: Tensor | None = None

    def choose(self, question: Question, k: int) -> Tensor:
        """Raises RuntimeError where no numbers are set."""
        if self.numbers is None:
            raise RuntimeError("select=Given(): set its `numbers`, those of the blocks, first")
        store = question.store
        ages, count = store.ages(), min(k, len(store))
        given = (store.added - self.numbers).to(ages.device)
        is_given = (given[:, :, None] == ages).any(1).float()
        chosen = best_ages(is_given, ages, count).sort(-1, descending=True).values
        return chosen[:, None, None].expand(*question.sets(self.granularity), count)


@dataclass(frozen=True)
class MeanKeys(Selector):
    """Reads the k blocks whose mean key has the highest score, as MoBA and InfLLM do; as an ablation of landmarks."""

    granularity: str = "per_token_and_head"
    summaries = MappingProxyType({"means": mean_keys})

    def choose(self, question: Question, k: int) -> Tensor:
        return best_of_summaries(question, k, question.store.summaries["means"], self.granularity)


class SecondLook(Selector):
    """A second look at the `proposed` best blocks of `inner`, whose queries choose by themselves ("per_token_and_…").

    Of the blocks that landmarks propose, a query reads the k with the largest s_b + log Σ_j exp s_j, with s_b the score
    of block b's landmark and s_j of its tokens j: the weight that the block would have if the landmark were a bias of
    its tokens' scores. That scores m·ℓ keys, whatever the length of the text. Where heads choose together, scores are
    logs of shares of what is proposed to them, and the best of these counts.
    """

    def __init__(self, proposed: int, inner: Selector):
        self.proposed, self.inner = proposed, inner
        self.granularity, self.summaries = inner.granularity, inner.summaries

    def choose(self, question: Question, k: int) -> Tensor:
        ages = self.inner.choose(question, self.proposed)
        if ages.shape[-1] <= k:
            return ages
        selected = None if ages.shape[1] < question.q.shape[1] else question.retrieves  # all heads of a group help
        scores = weights_of_blocks(question, ages, selected)
        if ages.shape[1] < scores.shape[1]:  # shares, of which the highest of the heads that choose together counts
            scores = scores.log_softmax(-1).unflatten(1, (ages.shape[1], -1)).amax(2)
        return best_in_order(scores.flip(-1), ages.flip(-1), k)
