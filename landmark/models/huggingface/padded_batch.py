"""Texts of several lengths that a model reads together: a batch of which some tokens are padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """Texts of a batch that have read as many tokens. rows: their numbers. cache: a `LandmarkCache`, in their order."""

    rows: list[int]
    cache: Any


class PaddedBatch:
    """Groups of texts that share a cache. columns: read so far, padding included."""

    def __init__(self, groups: list[Group], columns: int):
        self.groups, self.columns = groups, columns

    @property
    def size(self) -> int:
        """Texts of the batch."""
        return sum(len(group.rows) for group in self.groups)

    def texts(self) -> list[Tensor]:
        """The ids that each text has, without landmarks and padding."""
        found = [zip(group.rows, group.cache.texts(len(group.rows)), strict=True) for group in self.groups]
        return [ids for _, ids in sorted((each for group in found for each in group), key=lambda each: each[0])]

    def caches(self) -> list[Any]:
        """The cache of each text."""
        found = {row: group.cache for group in self.groups for row in group.rows}
        return [found[row] for row in sorted(found)]

    def divide(self, kinds: list[tuple[int, bool]]) -> list[Group]:
        """The groups, divided by what their texts read next. kinds: of each the number of tokens, and whether they are
        `prefill`.
        """
        divided = []
        for group in self.groups:
            alike: dict[tuple[int, bool], list[int]] = {}
            for at, row in enumerate(group.rows):
                alike.setdefault(kinds[row], []).append(at)
            for places in alike.values():
                rows = [group.rows[at] for at in places]
                divided.append(
                    Group(rows, group.cache if len(alike) == 1 else group.cache.select(torch.tensor(places)))
                )
        self.groups = divided
        return divided

    def select(self, samples: Tensor) -> PaddedBatch:
        """A copy whose texts are these of the batch. samples: (n,), integer; one may occur more than once."""
        chosen = []
        for group in self.groups:
            places = [(new, group.rows.index(old)) for new, old in enumerate(samples.tolist()) if old in group.rows]
            if places:
                rows, at = map(list, zip(*places, strict=True))
                chosen.append(Group(rows, group.cache.select(torch.tensor(at))))
        return PaddedBatch(chosen, self.columns)
