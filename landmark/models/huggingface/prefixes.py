"""Prefix caching: a text that begins as one that was read before is read from there on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from landmark.models.huggingface.landmark_cache import LandmarkCache
from landmark.models.huggingface.turns import Turns
from landmark.utils.errors import UserError
from landmark.utils.hardware import free_memory_bytes
from landmark.utils.weights import weights_state

LOG = logging.getLogger(__name__)
SHARE = 0.5  # of the free memory that is for memories


class Saved(NamedTuple):
    """A memory that can be loaded where none is kept that has read as much: the first `tokens` of a text. ends: as of
    `LandmarkCache`.
    """

    tokens: int
    ends: tuple[int, ...]
    load: Callable[[], LandmarkCache]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each text that was read alone."""
        return (0, *self.ends[:-1])


@dataclass(eq=False)
class _Kept:
    """A memory, and whose texts may go on from it. in_use: a text is being read with it."""

    cache: LandmarkCache
    owner: str
    in_use: bool = True

    def shared(self, ids: Tensor) -> int:
        """Tokens at the beginning of the ids (T,) that the memory has read too."""
        read = self.cache.ids[0] if self.cache.ids.numel() else self.cache.ids.new_zeros(0)
        same = min(len(read), len(ids))
        other = (read[:same].cpu() != ids[:same]).nonzero()
        return int(other[0]) if len(other) else same


class PrefixCache:
    """Memories of the texts that were read last, within a number of bytes; the least recently used go first, and the
    log says so. The last one stays, whatever its size.

    `using(ids)` finds the memory that shares the longest beginning with a text. Where the text goes on behind all that
    it has read, that memory itself goes on; else a copy from the last mark before the difference (`mark_before`).
    """

    def __init__(self, model: Any, most_bytes: int | None = None, **settings: Any):
        """model: a model with landmarks. most_bytes: None: half of the free memory of its device. settings: of its
        memories, as of `LandmarkModel.new_memory`.
        """
        self.model, self.settings = model, settings
        self.most_bytes = int(SHARE * free_memory_bytes(model.device)) if most_bytes is None else most_bytes
        self._kept: list[_Kept] = []  # the least recently used first
        self.lock = Turns()  # held while a memory is read with; another thread may copy one

    def generate(self, ids: Tensor, **settings: Any) -> Tensor:
        """As `model.generate` of a whole text (1, T), of which only what is new is read."""
        with self.lock, self.using(ids[0].tolist()) as cache:
            return self.model.generate(ids, past_key_values=cache, **settings)

    @contextmanager
    def using(self, ids: Sequence[int], owner: str = "", saved: Saved | None = None) -> Iterator[LandmarkCache]:
        """A memory of the same owner that has read a beginning of a text, at most all but the last id. It is kept.

        saved: of a beginning of the text; it says which texts in it are read alone. Raises UserError where it is of
        other texts.
        """
        wanted, ends = torch.tensor(list(ids[:-1]), dtype=torch.int64), saved.ends if saved else ()
        loaded = None if saved is None or self._has(wanted[: saved.tokens], owner, ends) else saved.load()
        with self.lock:
            if loaded is not None:
                self.add(loaded, owner)
            found = self._found(wanted, owner, ends)
            if found.cache.ends != ends:
                raise UserError("several texts: one of them was replaced meanwhile, ask again")
            self._kept.append(found)
        try:
            yield found.cache
        finally:
            with self.lock:
                found.in_use = False
                self._kept.remove(found)
                if not found.cache.torn:
                    self._kept.append(found)
                self._drop()

    def add(self, cache: LandmarkCache, owner: str = "") -> None:
        """Keep a memory, as one that was loaded."""
        with self.lock:
            cache.marks = cache.marks or []
            self._kept.append(_Kept(cache, owner, in_use=False))
            self._drop()

    def longest(self, ids: Sequence[int], owner: str = "") -> int:
        """Tokens at the beginning of a text that need not be read again."""
        with self.lock:
            return self._best(torch.tensor(list(ids), dtype=torch.int64), owner, ())[0]

    def _has(self, wanted: Tensor, owner: str, ends: tuple[int, ...]) -> bool:
        """Whether a memory has read all of a text; its last tokens may be read again with what follows."""
        with self.lock:
            return any(each.shared(wanted) == len(wanted) for each in self._mine(owner, ends))

    def _mine(self, owner: str, ends: tuple[int, ...]) -> list[_Kept]:
        """The memories of an owner that are the model's as it is now, and have read the same texts alone."""
        state, mine = weights_state(model := self._model), (each for each in self._kept if each.owner == owner)
        return [each for each in mine if each.cache.ends == ends and each.cache.fits(model, state)]

    @property
    def _model(self) -> Any:
        """The model without PEFT's wrapper."""
        return getattr(self.model, "get_base_model", lambda: self.model)()

    def _best(self, wanted: Tensor, owner: str, ends: tuple[int, ...]) -> tuple[int, _Kept | None, Any]:
        """Tokens that need not be read, the memory that has read them, and the mark there (None: its end)."""
        best: tuple[int, _Kept | None, Any] = (-1 if ends else 0, None, None)  # short texts may all be read again
        for kept in self._mine(owner, ends):
            shared, read = kept.shared(wanted), kept.cache.get_seq_length()
            if shared == read and not kept.in_use and kept.cache.settled > best[0]:
                best = (kept.cache.settled, kept, None)
            if (mark := kept.cache.mark_before(shared)) is not None and best[0] < mark.tokens:
                best = (mark.tokens, kept, mark)
        return best

    def _found(self, wanted: Tensor, owner: str, ends: tuple[int, ...]) -> _Kept:
        _, kept, mark = self._best(wanted, owner, ends)
        if kept is None:
            cache = self.model.new_memory(**self.settings)
            cache.marks = []
            return _Kept(cache, owner)
        if mark is not None:
            return _Kept(kept.cache.fork(mark), owner)
        self._kept.remove(kept)
        kept.in_use = True
        kept.cache.settle()
        kept.cache.add_mark()
        return kept

    def _drop(self) -> None:
        """Drop the least recently used memories that are too many."""
        total = sum(kept.cache.nbytes for kept in self._kept)
        for kept in [kept for kept in self._kept[:-1] if not kept.in_use]:
            if total <= self.most_bytes:
                return
            size, tokens = kept.cache.nbytes, kept.cache.get_seq_length()
            total -= size
            self._kept.remove(kept)
            LOG.info(
                f"a text of {tokens:,} tokens will be read again when it is asked about: memories take more than "
                f"{self.most_bytes:,} bytes together, its own {size:,}"
            )
