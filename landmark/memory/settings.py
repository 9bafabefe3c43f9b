"""Settings of a memory that mean nothing are refused."""

from __future__ import annotations

from collections.abc import Sequence

from landmark.memory.index import INDEX_TYPES, INDICES, import_faiss
from landmark.memory.positions import MAPPINGS
from landmark.memory.retrieval import GRANULARITIES, SCORERS
from landmark.memory.tiers import TIERS
from landmark.utils.errors import UserError


def check_settings(
    *,
    k: int,
    max_blocks: int | None,
    granularity: str,
    scorer: str,
    tier: str = "device",
    cutoff: float | Sequence[float] = 0.0,
    mapping: str = "stingy",
    cache: int = 1,
    index: str = "exact",
    index_type: str = "flat",
    candidates: int = 1,
) -> None:
    """Raise UserError for retrieval settings that mean nothing."""
    if k < 0:
        raise UserError(f"retrieval.k={k}: the number of retrieved blocks cannot be negative")
    if max_blocks is not None and max_blocks < max(k, 1):
        raise UserError(
            f"memory.blocks={max_blocks} is less than retrieval.k={k}: keep at least as many blocks as are retrieved"
        )
    if not all(0 <= value <= 1 for value in (cutoff if isinstance(cutoff, Sequence) else [cutoff])):
        raise UserError(f"cmt.cutoff={cutoff}: a cutoff is compared with a weight, from 0 to 1")
    if cache < 1:
        raise UserError(f"memory.cache={cache}: a tier other than the device needs room for a block to fetch")
    for name, value, known in (
        ("retrieval.granularity", granularity, GRANULARITIES),
        ("retrieval.scorer", scorer, SCORERS),
        ("memory.tier", tier, TIERS),
        ("positions.mapping", mapping, MAPPINGS),
        ("memory.index", index, INDICES),
        ("memory.index_type", index_type, INDEX_TYPES),
    ):
        if value not in known:
            raise UserError(f"{name}={value}: must be one of {', '.join(known)}")
    if candidates < 1:
        raise UserError(f"memory.candidates={candidates}: a query needs at least one")
    if index == "faiss":
        if max_blocks is not None:
            raise UserError(f"memory.index=faiss: an index forgets nothing, memory.blocks={max_blocks} must be null")
        if scorer != "landmark":
            raise UserError(f"memory.index=faiss: it is of the landmarks, retrieval.scorer={scorer} does not use them")
        import_faiss()
