"""What stands for a block, so that a query can choose blocks without reading their tokens: the seam of scorers.

A scorer is a class `Scorer` in a file of its own: in landmark/memory/blocks/scorers, or anywhere on Python's path.
`retrieval.scorer=NAME` or `retrieval.scorer=my.module` chooses it; in Python `new_memory(scorer=…)` takes one too. Its
settings are its fields: `retrieval.scorer={name: NAME, FIELD: VALUE}`.

Shapes: C caches, one for each sample and key/value head, samples first; n blocks of ℓ tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_args, get_type_hints

from torch import Tensor

from landmark.utils.errors import UserError
from landmark.utils.trust import load_from_module, name_modules

Rotation = Callable[[Tensor, Tensor], Tensor]
"""Turns keys (…, n, r, d) of n blocks as if these stood by distances (…, n) positions later in the text."""

WHERE, KEY = "landmark.memory.blocks.scorers", "retrieval.scorer"


@dataclass(frozen=True)
class BlockScorer:
    """Summaries of blocks, and what queries score them by.

    has_kernels: whether there are kernels for it; without them blocks are chosen and read in plain PyTorch, on a GPU
    too.
    """

    has_kernels: ClassVar[bool] = False

    def in_layer(self, layer: int) -> BlockScorer:
        """The scorer of a layer."""
        return self

    def check_model(self, digest: Callable[[], str | None], block_size: int) -> None:
        """Raise UserError where the scorer does not fit a model, whose weights `digest` names, or its blocks."""

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        """Summaries (C, n, …) of complete blocks, which may also be none.

        keys, values: (C, n, ℓ, d), keys as the model rotates them. first: the number of the first block in its text.
        Queries are scored in the type of the summaries.
        """
        raise NotImplementedError

    def write(self, out: Tensor, keys: Tensor, values: Tensor, first: int) -> None:
        """`summarise` to where summaries are kept, out (C, n, …)."""
        out.copy_(self.summarise(keys, values, first))

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        """Scores (C, …, n), in the scale of log-sum-exps of the scores of keys. Shares of their softmax rank blocks.

        queries: (C, …, G, τ, d), scaled, of the G heads that share keys. summaries: (C, n, …). softcap: of the model's
        scores (`landmark.attention.scoring.capped`).
        """
        raise NotImplementedError

    def moved(self, summaries: Tensor, rotation: Rotation, distances: Tensor) -> Tensor:
        """Summaries (C, n, …) of blocks that stand by distances (n,) positions later in the text.

        As it is here for summaries (C, n, r, d) that are vectors, which turn as keys do.
        """
        return rotation(summaries, distances)

    def saved(self) -> str | dict[str, Any]:
        """As files and identities have it: its name, with its settings where it has some."""
        module = type(self).__module__
        name_modules([module])  # it is imported already
        name = module.removeprefix(f"{WHERE}.")
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"name": name, **own} if own else name


def scorer_of(said: str | Mapping[str, Any] | BlockScorer) -> BlockScorer:
    """The scorer that a setting names. Raises UserError where there is none, or where its settings do not fit it."""
    if isinstance(said, BlockScorer):
        return said
    given = {"name": said} if isinstance(said, str) else dict(said)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"{KEY}={said}: must be a name, or {{name: NAME, SETTING: VALUE}}")
    kind = load_from_module(WHERE, name, "Scorer", key=KEY)
    if unknown := sorted(given.keys() - {item.name for item in fields(kind)}):
        known = ", ".join(item.name for item in fields(kind)) or "none"
        raise UserError(f"{KEY}={said}: {name} has no setting {', '.join(unknown)}; it has {known}")
    for field, wanted in _types_of(kind).items():
        if field in given and not _is_of(given[field], wanted):
            raise UserError(
                f"{KEY}={said}: {field}={given[field]} must be of type {getattr(wanted, '__name__', wanted)}"
            )
    try:
        return kind(**given)
    except TypeError as error:
        raise UserError(f"{KEY}={said}: {error}") from error


def _types_of(kind: type) -> dict[str, Any]:
    """The types of a scorer's fields; none where its module imports some for type checkers alone."""
    try:
        return get_type_hints(kind)
    except NameError:
        return {}


def _is_of(value: Any, wanted: Any) -> bool:
    """Whether a setting has the type of its field; of types that are no plain ones nothing is known."""
    kinds = get_args(wanted) or (wanted,)
    if any(not isinstance(kind, type) for kind in kinds):
        return True
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))
