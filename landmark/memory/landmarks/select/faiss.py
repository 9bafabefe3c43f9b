"""Retrieval by an index of the landmarks (faiss), for texts so long that scoring all landmarks takes too long.

1. The last k blocks are scored exactly.
2. All older landmarks have the same lag (Section 3.2.1). For each query the index finds those with the highest scores,
   the candidates.
3. The k blocks with the highest scores are chosen, by each query and head for itself.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from landmark.attention.scoring import capped
from landmark.memory.landmarks.block_store import BlockStore
from landmark.memory.landmarks.layer import Question
from landmark.memory.landmarks.select.scores import best_in_order, scores_of
from landmark.memory.landmarks.select.selector import Best, Selector
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

    candidates: landmarks that the index finds for each query, k at least. exact: chooses where there is nothing to
    find. indices: of the layers, by their stores. An index cannot drop blocks: a store that does needs another
    selector. Raises UserError where faiss is not installed.
    """

    candidates: int = 16
    exact: Best = Best()  # noqa: RUF009 (it is frozen)
    granularity: str = field(default="per_token_and_head", init=False)
    indices: "WeakKeyDictionary[BlockStore, LandmarkIndex]" = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self):
        import_faiss()

    def __getstate__(self) -> object:
        """Raises UserError: faiss's objects cannot be copied."""
        raise UserError("memory.index=faiss: such a memory cannot be copied or pickled, save it and load it")

    def choose(self, question: Question, k: int) -> Tensor:
        store, queries, cap = question.store, question.exact, question.softcap
        if self.exact.is_tied(question) or len(store) <= k:
            return self.exact.choose(question, k)
        index = self.indices.get(store)
        if index is None:
            index = self.indices[store] = LandmarkIndex()
        newest = torch.arange(1, k + 1, device=queries.device)
        lagged, keys = queries[question.lags.scoring(newest) - 1], store.landmarks[:, :, store.rows(newest)]
        scores = scores_of(lagged, keys, cap)
        searched = queries[-1].transpose(1, 2).unflatten(1, (store.kv_heads, -1)).flatten(2, 3)
        found, numbers = index.search(store, searched, len(store) - k, max(self.candidates, k))
        found, numbers = (x.view(*scores.shape[:3], -1) for x in (found, numbers))
        found = capped(found, cap).masked_fill(numbers < 0, -torch.inf)
        ages, order = torch.cat([newest.expand_as(scores), store.added - numbers], -1).sort(-1)
        return best_in_order(torch.cat([scores, found], -1).gather(-1, order), ages, k)


class LandmarkIndex:
    """The landmarks of one layer, in one faiss index by inner product for each sample and key/value head.

    A query is compared with the landmarks in the PROBED nearest lists of an inverted file; with all, as long as there
    are no more lists. The file is made again whenever the number of blocks has doubled. New blocks are added at the
    next search.
    """

    def __init__(self):
        self._faiss = import_faiss()
        self._indices: list[Any] = []
        self._added = self._built = 0  # blocks in each index, now and when its lists were made

    def search(self, store: BlockStore, queries: Tensor, blocks: int, count: int) -> tuple[Tensor, Tensor]:
        """Scores and numbers (B, H_kv, n, count) of the best of the first `blocks` blocks; a number of −1 for none.

        queries: (B, H_kv, n, d).
        """
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        self._add(store, blocks)
        found = [
            index.search(_numbers(query), count)
            for index, query in zip(self._indices, queries.flatten(0, 1), strict=True)
        ]
        scores, numbers = (torch.from_numpy(np.stack(each)) for each in zip(*found, strict=True))
        shape = *queries.shape[:3], count
        return scores.to(queries).view(shape), numbers.to(queries.device).view(shape)

    def _add(self, store: BlockStore, blocks: int) -> None:
        landmarks = store.landmarks[:, :, :blocks].flatten(0, 1)
        if not self._indices or blocks >= 2 * max(self._built, POINTS_PER_LIST):
            self._added, self._built = 0, blocks
            self._indices = [self._new(_numbers(keys)) for keys in landmarks]
        if blocks > self._added:
            for index, keys in zip(self._indices, landmarks, strict=True):
                index.add(_numbers(keys[self._added :]))
            self._added = blocks

    def _new(self, keys: np.ndarray) -> Any:
        faiss, (blocks, dim) = self._faiss, keys.shape
        lists = min(blocks // POINTS_PER_LIST, int(4 * blocks**0.5))
        if lists <= PROBED:
            return faiss.IndexFlatIP(dim)
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = PROBED
        index.train(keys)
        return index


def _numbers(keys: Tensor) -> np.ndarray:
    return np.ascontiguousarray(keys.float().cpu().numpy())
