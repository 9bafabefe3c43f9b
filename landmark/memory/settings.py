"""The settings of a memory: their choices, and checks of their values. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from landmark.utils.errors import UserError
from landmark.utils.fractions import fraction, joint_softmax_of

GRANULARITIES = ("per_token_and_head", "per_token_and_group", "per_head", "per_token")
SCORERS = ("landmark", "recent", "random", "mean_key", "given")
TIERS = ("device", "cpu", "disk")
MAPPINGS = ("stingy", "true")
LANDMARK_KEYS = ("token", "mean", "pooled")
INDICES = ("exact", "faiss")
INDEX_TYPES = ("flat", "ivf")


def choosing_heads(granularity: str, heads: int, kv_heads: int) -> int:
    """How many heads, or groups of them, choose blocks of their own: H, H_kv or 1."""
    return {"per_token": 1, "per_token_and_group": kv_heads}.get(granularity, heads)


def check_settings(
    *,
    k: int,
    max_blocks: int | None,
    granularity: str,
    scorer: str,
    block_size: int = 1,
    tier: str = "device",
    cutoff: float | Sequence[float] = 0.0,
    mapping: str = "stingy",
    key_offset: float = 0.0,
    landmark_key: str = "token",
    cache: int = 1,
    index: str = "exact",
    index_type: str = "flat",
    candidates: int = 1,
    local_blocks: int = 0,
    fan_out: int | None = None,
    levels: int = 1,
    softcap: float | None = None,
    uneven: bool = False,
    landmark_values: bool = False,
    rerank: int | None = None,
    recent: int = 0,
    joint_softmax: float = 0.0,
    query_window: int = 1,
) -> None:
    """Raise UserError, naming the setting, for a value out of range or for two values that exclude each other.

    Args: as in `landmark.memory.Memory`. A default here is a value that is always allowed.
    """
    whole = {"model.block_size": block_size, "retrieval.k": k, "memory.blocks": max_blocks, "memory.cache": cache}
    whole |= {"memory.candidates": candidates, "model.local_blocks": local_blocks, "retrieval.rerank": rerank}
    whole |= {"retrieval.recent": recent, "retrieval.query_window": query_window}
    for name, value in whole.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"{name}={value!r}: must be a whole number")
    if block_size < 1:
        raise UserError(f"model.block_size={block_size}: a block needs at least one token")
    if local_blocks < 0:
        raise UserError(f"model.local_blocks={local_blocks}: the number of blocks cannot be negative")
    if k < 0:
        raise UserError(f"retrieval.k={k}: the number of retrieved blocks cannot be negative")
    if max_blocks is not None and max_blocks < max(k, 1):
        raise UserError(
            f"memory.blocks={max_blocks} is less than retrieval.k={k}: keep at least as many blocks as are retrieved"
        )
    key, cutoffs = ("cutoffs", cutoff) if isinstance(cutoff, list | tuple) else ("cutoff", [cutoff])
    for value in cutoffs:
        fraction(f"cmt.{key}", value, "because it is compared with a weight", cutoff)
    fraction("model.key_offset", key_offset, "a fraction of a head's channels")
    joint_softmax_of(joint_softmax)
    if cache < 1:
        raise UserError(f"memory.cache={cache}: must be at least 1, because blocks are fetched into the cache")
    for name, value, choices in (
        ("retrieval.granularity", granularity, GRANULARITIES),
        ("retrieval.scorer", scorer, SCORERS),
        ("memory.tier", tier, TIERS),
        ("positions.mapping", mapping, MAPPINGS),
        ("model.landmark_key", landmark_key, LANDMARK_KEYS),
        ("memory.index", index, INDICES),
        ("memory.index_type", index_type, INDEX_TYPES),
    ):
        if value not in choices:
            raise UserError(f"{name}={value}: must be one of {', '.join(choices)}")
    if rerank is not None and rerank < k:
        raise UserError(f"retrieval.rerank={rerank} is less than retrieval.k={k}: of more blocks k are chosen")
    if rerank is not None:
        _check_only(
            f"retrieval.rerank={rerank} chooses among the blocks with the best landmarks, for each query and head",
            ("retrieval.granularity", granularity, "per_token_and_head"),
            ("retrieval.scorer", scorer, "landmark"),
        )
    if not 0 <= recent <= k:
        raise UserError(f"retrieval.recent={recent}: must be 0 to retrieval.k={k}, of which they are a part")
    if recent:
        _check_only(
            f"retrieval.recent={recent} keeps the newest blocks beside those with the best landmarks",
            ("retrieval.scorer", scorer, "landmark"),
            ("memory.index", index, "exact"),
            ("model.fan_out", fan_out, None),
        )
    if not 1 <= query_window <= block_size:
        raise UserError(f"retrieval.query_window={query_window}: must be 1 to model.block_size={block_size}")
    if query_window > 1:
        why = f"with retrieval.query_window={query_window} blocks are those with the best scores for a few queries"
        if scorer not in ("landmark", "mean_key"):
            raise UserError(f"retrieval.scorer={scorer}: {why}, set landmark or mean_key")
        _check_only(
            why,
            ("memory.index", index, "exact"),
            ("model.fan_out", fan_out, None),
            ("uneven (model.block_ends)", uneven, False),
        )
    if candidates < 1:
        raise UserError(f"memory.candidates={candidates}: must be at least 1")
    if fan_out is not None and (fan_out < 2 or levels < 1):
        raise UserError(f"model.fan_out={fan_out}, model.levels={levels}: must be at least 2 and 1")
    if fan_out is not None:
        _check_only(
            f"with model.fan_out={fan_out} blocks are found by their groups",
            ("retrieval.granularity", granularity, "per_token_and_head"),
            ("retrieval.scorer", scorer, "landmark"),
            ("memory.index", index, "exact"),
            ("memory.blocks", max_blocks, None),
            ("model.local_blocks", local_blocks, 0),
        )
    if softcap is not None and softcap <= 0:
        raise UserError(f"softcap={softcap}: must be above 0")
    if softcap is not None and (fan_out is not None or index == "faiss"):
        raise UserError(f"softcap={softcap}: groups of landmarks (fan_out) and memory.index=faiss do not cap scores")
    if uneven:
        _check_only(
            "blocks that end early (model.block_ends) go without",
            ("memory.tier", tier, "device"),
            ("memory.index", index, "exact"),
            ("model.fan_out", fan_out, None),
            ("model.local_blocks", local_blocks, 0),
        )
        if landmark_key == "pooled" or scorer == "given":
            name = "retrieval.scorer=given" if scorer == "given" else "model.landmark_key=pooled"
            raise UserError(f"{name}: is for blocks of one size, blocks that end early (model.block_ends) have none")
    if landmark_values and (fan_out is not None or index == "faiss" or k == 0):
        raise UserError(
            "model.landmark_values=true: every block is scored, and the best retrieved; leave out model.fan_out, "
            "memory.index=faiss and retrieval.k=0"
        )
    if joint_softmax and (fan_out is not None or landmark_values):
        name = "fan_out" if fan_out is not None else "landmark_values"
        raise UserError(f"model.joint_softmax={joint_softmax}: goes without model.{name}")
    if index == "faiss" and candidates < (most := max(k, rerank or 0)):
        name = "k" if rerank is None else "rerank"
        raise UserError(
            f"memory.candidates={candidates} is less than retrieval.{name}={most}: raise it to at least {most}"
        )
    if index == "faiss" and max_blocks is not None:
        raise UserError(f"memory.index=faiss: the index cannot drop blocks, so memory.blocks={max_blocks} must be null")
    if index == "faiss" and scorer != "landmark":
        raise UserError(f"memory.index=faiss: it ranks by landmarks, so retrieval.scorer={scorer} must be landmark")


def _check_only(why: str, *settings: tuple[str, object, object]) -> None:
    """Raise UserError, and say why, for a setting (name, value, only) whose value is not the only one allowed."""
    for name, value, only in settings:
        if value != only:
            raise UserError(f"{name}={value}: {why}, set {'null' if only is None else only}")
