"""Candidates for retrieval from an index of the landmarks, where a scan of all of them takes too long.

The last k blocks are always scored exactly. The landmarks of all older blocks stand at one lag (Section 3.2.1), and
faiss finds for each query the candidates among them with the highest scores. This differs from a scan, even where no
candidate is missed, when heads or tokens choose together: each one's scores are normalised over its own candidates, not
over all blocks, and a block that is no candidate of a query gets nothing from it.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landmark.memory.block_store import BlockStore
from landmark.memory.positions import scoring_lag
from landmark.utils.errors import UserError

POINTS_PER_LIST = 40  # landmarks that faiss needs for one mean
PROBED = 32  # lists of the inverted file that are searched for a query


def import_faiss() -> Any:
    """Raises UserError where faiss is not installed."""
    try:
        return importlib.import_module("faiss")
    except ImportError as error:
        raise UserError("memory.index=faiss: faiss is not installed, `pip install 'landmark[faiss]'`") from error


class LandmarkIndex:
    """The landmarks of one layer in faiss, one index for each sample and key/value head, by inner product.

    kind: "flat" compares all landmarks. "ivf" is an inverted file, of lists around the means of similar landmarks; it
    is flat while there are few blocks, and made anew whenever their number has doubled.
    candidates: landmarks that each query gets. Blocks are added at the next search.
    """

    def __init__(self, kind: str, candidates: int):
        self.kind, self.candidates = kind, candidates
        self._faiss = import_faiss()
        self._indices: list[Any] = []
        self._added = self._built = 0  # blocks in each index now, and when its lists were made

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


def retrieve_candidates(
    rotated_queries: Tensor, store: BlockStore, index: LandmarkIndex, *, k: int, granularity: str, num_recent: int
) -> Tensor:
    """Score the last k blocks and the candidates of the index, and choose.

    Args: those of `landmark.memory.retrieval.retrieve`, and the index of the store's landmarks.

    Returns ages as `retrieve` does.
    """
    slots, batch, queries, heads, dim = rotated_queries.shape
    group, recent = heads // store.kv_heads, min(k, len(store))
    recent_ages = torch.arange(1, recent + 1, device=rotated_queries.device)
    keys = store.landmarks[:, :, store.rows(recent_ages)].repeat_interleave(group, 1)
    lag = scoring_lag(recent_ages, num_recent, slots)
    scores = torch.einsum("nbthd,bhnd->bhtn", rotated_queries[lag - 1], keys)
    older = len(store) - recent
    ages = recent_ages.expand_as(scores)
    if older:
        searched = rotated_queries[-1].transpose(1, 2).reshape(batch, store.kv_heads, group * queries, dim)
        found, numbers = (x.view(batch, heads, queries, -1) for x in index.search(store, searched, older))
        scores, ages = torch.cat([scores, found], -1), torch.cat([ages, store.added - numbers], -1)
    if granularity != "per_token_and_head":
        scores = scores - scores.logsumexp(-1, keepdim=True)
    if granularity == "per_head":
        scores, ages = (x.flatten(2)[:, :, None] for x in (scores, ages))
    elif granularity == "per_token":
        scores, ages = (x.transpose(1, 2).flatten(2)[:, None] for x in (scores, ages))
    return _best(scores, ages, recent).sort(-1, descending=True).values


def _best(scores: Tensor, ages: Tensor, count: int) -> Tensor:
    """Ages (…, count) of the blocks with the highest scores (…, n), each block once; among equal scores the newer."""
    chosen = []
    for _ in range(count):
        best = scores.amax(-1, keepdim=True)
        age = ages.masked_fill(scores < best, torch.iinfo(ages.dtype).max).amin(-1, keepdim=True)
        scores = scores.masked_fill(ages == age, -torch.inf)
        chosen.append(age)
    return torch.cat(chosen, -1)


def _numbers(keys: Tensor) -> np.ndarray:
    return np.ascontiguousarray(keys.float().cpu().numpy())
