"""Retrieval by an index of the landmarks (faiss), for texts so long that scoring all landmarks takes too long.

1. The last k blocks are scored exactly.
2. All older landmarks have the same lag (Section 3.2.1). For each query the index finds those with the highest scores,
   the candidates.
3. Where heads or queries choose together, the scores of each are normalised over its own candidates, not over all
   blocks, and a block that is no candidate of a query gets no score from it. So the result can differ from that of
   scoring all landmarks, even where the index misses no candidate.
4. The k blocks with the highest scores are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from landmark.attention.scoring import capped
from landmark.memory.layer import Question
from landmark.memory.select.scores import scores_of
from landmark.memory.select.selector import Best, Selector
from landmark.memory.settings import choosing_heads
from landmark.memory.store import BlockStore
from landmark.utils.errors import UserError

POINTS_PER_LIST = 40  # landmarks that faiss needs to train one list
PROBED = 32  # lists of the inverted file that are searched for each query


def import_faiss() -> Any:
    """The module faiss. Raises UserError where it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise UserError("memory.index=faiss: faiss is not installed, `pip install 'landmark[faiss]'`") from error
    return faiss


@dataclass(frozen=True, eq=False)
class Faiss(Selector):
    """Reads the k best of the last blocks and of the candidates of an index.

    candidates: landmarks that the index finds for each query. kind: "ivf", an inverted file, approximate, or "flat".
    exact: chooses where there is nothing to find, and has the granularity. indices: of the layers, by their stores.
    An index cannot drop blocks: a store that does needs another selector. Raises UserError where faiss is not
    installed.
    """

    candidates: int = 16
    kind: str = "ivf"
    exact: Best = Best()  # noqa: RUF009 (it is frozen)
    indices: WeakKeyDictionary[BlockStore, LandmarkIndex] = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self):
        import_faiss()

    def __getstate__(self) -> object:
        """Raises UserError: faiss's objects cannot be copied."""
        raise UserError("memory.index=faiss: such a memory cannot be copied or pickled, save it and load it")

    def choose(self, question: Question) -> Tensor:
        if self.exact.is_tied(question) or len(question.store) <= question.k:
            return self.exact.choose(question)
        index = self.indices.get(question.store)
        if index is None:
            index = self.indices[question.store] = LandmarkIndex(self.kind, self.candidates)
        return _choose_candidates(question, index, self.granularity)

    @property
    def granularity(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.exact.granularity

    def check_samples_can_be_selected(self) -> None:
        raise UserError("memory.index=faiss: its samples cannot be reordered; use memory.index=exact")


class LandmarkIndex:
    """The landmarks of one layer, in one faiss index by inner product for each sample and key/value head.

    kind: "flat" compares a query with all landmarks; "ivf" with those in the PROBED nearest lists of an inverted file.
    An inverted file starts flat, and is made again whenever the number of blocks has doubled.
    candidates: landmarks found for each query. New blocks are added at the next search.
    """

    def __init__(self, kind: str, candidates: int):
        self.kind, self.candidates = kind, candidates
        self._faiss = import_faiss()
        self._indices: list[Any] = []
        self._added = self._built = 0  # blocks in each index, now and when its lists were made

    def search(self, store: BlockStore, queries: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Scores and numbers (B, H_kv, n, candidates) of the best of the first `blocks` blocks; −∞ and −1 for none.

        queries: (B, H_kv, n, d).
        """
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        self._add(store, blocks)
        found = [
            index.search(np.ascontiguousarray(query.float().cpu().numpy()), self.candidates)
            for index, query in zip(self._indices, queries.flatten(0, 1), strict=True)
        ]
        scores, numbers = (torch.from_numpy(np.stack(each)) for each in zip(*found, strict=True))
        scores = scores.masked_fill(numbers < 0, -torch.inf)
        shape = *queries.shape[:3], self.candidates
        return scores.to(queries).view(shape), numbers.to(queries.device).view(shape)

    def _add(self, store: BlockStore, blocks: int) -> None:
        landmarks = store.landmarks[:, :, :blocks].flatten(0, 1)
        if not self._indices or (self.kind == "ivf" and blocks >= 2 * max(self._built, POINTS_PER_LIST)):
            self._added, self._built = 0, blocks
            self._indices = [self._new(_numbers(keys)) for keys in landmarks]
        if blocks > self._added:
            for index, keys in zip(self._indices, landmarks, strict=True):
                index.add(_numbers(keys[self._added :]))
            self._added = blocks

    def _new(self, keys: np.ndarray) -> Any:
        faiss, (blocks, dim) = self._faiss, keys.shape
        lists = min(blocks // POINTS_PER_LIST, int(4 * blocks**0.5))
        if self.kind == "flat" or lists <= PROBED:
            return faiss.IndexFlatIP(dim)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = PROBED
        index.train(keys)
        return index


def _choose_candidates(question: Question, index: LandmarkIndex, granularity: str) -> Tensor:
    """The ages of blocks chosen among the last k and the candidates of the index."""
    store, queries = question.store, question.exact
    _, batch, length, heads, dim = queries.shape
    group, count = heads // store.kv_heads, min(question.k, len(store))
    ages_of_last = torch.arange(1, count + 1, device=queries.device)
    lagged, keys = queries[question.lags.scoring(ages_of_last) - 1], store.landmarks[:, :, store.rows(ages_of_last)]
    scores = scores_of(lagged, keys, question.softcap)
    older = len(store) - count
    ages = ages_of_last.expand_as(scores)
    if older:
        searched = queries[-1].transpose(1, 2).reshape(batch, store.kv_heads, group * length, dim)
        found, numbers = (x.view(batch, heads, length, -1) for x in index.search(store, searched, older))
        found = capped(found, question.softcap).masked_fill(numbers < 0, -torch.inf)
        scores, ages = torch.cat([scores, found], -1), torch.cat([ages, store.added - numbers], -1)
    if granularity != "per_token_and_head":
        scores = scores - scores.logsumexp(-1, keepdim=True)
    if granularity == "per_head":
        scores, ages = (x.flatten(2)[:, :, None] for x in (scores, ages))
    elif granularity != "per_token_and_head":
        choosing = choosing_heads(granularity, heads, store.kv_heads)
        scores, ages = (x.unflatten(1, (choosing, -1)).transpose(2, 3).flatten(3) for x in (scores, ages))
    return _best(scores, ages, count).sort(-1, descending=True).values


def _best(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages (…, count) of the distinct blocks with the highest scores (…, n); among equal scores the newer block."""
    chosen = []
    for _ in range(count):
        best = scores.amax(-1, keepdim=True)
        age = ages.masked_fill(scores < best, torch.iinfo(ages.dtype).max).amin(-1, keepdim=True)
        scores = scores.masked_fill(ages == age, -torch.inf)
        chosen.append(age)
    return torch.cat(chosen, -1)


def _numbers(keys: Tensor) -> np.ndarray:
    return np.ascontiguousarray(keys.float().cpu().numpy())
