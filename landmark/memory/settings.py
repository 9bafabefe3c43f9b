"""The settings of a memory, flat as on the command line, their checks, and the objects that they stand for.

Loads no torch before `memory_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from landmark.memory.choices import GRANULARITIES, INDEX_TYPES, INDICES, MAPPINGS, SCORERS, TIERS
from landmark.utils.errors import UserError
from landmark.utils.fractions import fraction
from landmark.utils.retired import check_retired, without_retired

if TYPE_CHECKING:
    from landmark.memory.memory import Memory
    from landmark.memory.select import Best, Selector

SETTINGS: dict[str, Any] = {  # with their defaults
    "k": 4,  # blocks that a query retrieves, or fewer where there are fewer
    "max_blocks": None,  # most blocks of each layer, the oldest are dropped first; None: all
    "granularity": "per_token_and_head",  # which queries and heads choose together (select/best.py)
    "scorer": "landmark",  # what ranks blocks: landmarks, or for ablations one of the other SCORERS
    "recent": 0,  # newest blocks that are always among the k (select/with_newest.py)
    "first": 0,  # blocks that begin the text and are always among the k (select/with_first.py)
    "rerank": None,  # blocks with the best summaries that get a second look (select/second_look.py); None: none do
    "tier": "device",  # where blocks are stored (store/tiers.py); results are the same, bit for bit
    "folder": None,  # of files of the tier "disk"; None: the system's for temporary files
    "cache": 128,  # blocks (all heads) fetched from another tier that the device holds for each layer
    "index": "exact",  # all landmarks are scored; "faiss": only `candidates` of older ones (select/faiss.py)
    "index_type": "ivf",  # of faiss: an inverted file, or "flat"
    "candidates": 16,  # landmarks that faiss finds for each query
    "mapping": "stingy",  # positions of blocks, "true" ones (positions.py), or without landmarks "auto": as they fit
    "window": None,  # of a text without landmarks: last tokens that every query sees (summaries.py); None: it has them
    "cutoff": 0.0,  # weight of a context miss token from which on a query retrieves; one, or one for each layer
    "seed": 0,  # of the scorer "random"
}
TRAINING_FREE: dict[str, Any] = {  # of models that read without landmarks, where nothing was trained
    "k": 32,
    "granularity": "per_token_and_group",
    "scorer": "mean_key",
    "rerank": 64,
    "first": 1,
    "window": 512,
    "mapping": "auto",
}
_NAMES = {  # on the command line, where they are not retrieval.…
    "max_blocks": "memory.blocks",
    **{name: f"memory.{name}" for name in ("tier", "folder", "cache", "index", "index_type", "candidates")},
    "mapping": "positions.mapping",
    "window": "memory.window",
}
_CHOICES = {
    "granularity": GRANULARITIES,
    "scorer": SCORERS,
    "tier": TIERS,
    "mapping": (*MAPPINGS, "auto"),
    "index": INDICES,
    "index_type": INDEX_TYPES,
}
# By what ranks blocks: the settings that change its question.
_REFINED = {
    "landmark": ("rerank", "recent", "first"),
    "mean_key": ("rerank", "recent", "first"),
    "faiss": ("rerank",),
}


def changed(usual: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The usual settings with those given in their place; a usual `rerank` is at least the k that is given."""
    every = {**usual, **given}
    if every.get("rerank") is not None and "rerank" not in given:
        every["rerank"] = max(every["rerank"], given.get("k", 0))
    return every


def check_settings(settings: Mapping[str, Any], block_size: int) -> None:
    """Raise UserError, naming the setting, for one that is unknown, removed, out of range, or without effect.

    settings: some of SETTINGS. block_size: ℓ.
    """
    check_retired(settings, "memory")
    if unknown := sorted(without_retired(settings).keys() - SETTINGS.keys()):
        raise UserError(f"memory has no setting {', '.join(unknown)}: it has {', '.join(sorted(SETTINGS))}")
    every = {"block_size": block_size, **SETTINGS, **settings}
    _check_numbers(every)
    for name, choices in _CHOICES.items():
        if every[name] not in choices:
            raise UserError(f"{_named(name, every)}: must be one of {', '.join(choices)}")
    cutoff = every["cutoff"]
    key, values = ("cutoffs", cutoff) if isinstance(cutoff, list | tuple) else ("cutoff", [cutoff])
    for value in values:
        fraction(f"cmt.{key}", value, "because it is compared with a weight", cutoff)
    ranks = "faiss" if every["index"] == "faiss" else every["scorer"]
    for name in ("rerank", "recent", "first"):
        if every[name] != SETTINGS[name] and name not in _REFINED.get(ranks, ()):
            by = _named("index" if ranks == "faiss" else "scorer", every)
            can = " or ".join(other for other, names in _REFINED.items() if name in names)
            raise UserError(
                f"{by}: {_named(name, every)} changes which blocks are best by {can}, leave out one of them"
            )
    if every["rerank"] is not None and not every["granularity"].startswith("per_token_and_"):
        raise UserError(
            f"{_named('granularity', every)}: {_named('rerank', every)} chooses for each query, and head or group: "
            "set per_token_and_head or per_token_and_group"
        )
    if every["window"] is None and every["mapping"] == "auto":
        raise UserError(f"{_named('mapping', every)}: is for texts without landmarks, set stingy or true")
    if every["window"] is not None and (ranks in ("landmark", "faiss") or any(values)):
        by = "cmt.cutoff" if any(values) else _named("index" if ranks == "faiss" else "scorer", every)
        raise UserError(f"{by}: the text has no landmarks to go by, set retrieval.scorer=mean_key alone")
    if every["index"] == "faiss" and (every["scorer"] != "landmark" or every["max_blocks"] is not None):
        raise UserError(
            f"memory.index=faiss: it ranks by landmarks and cannot drop blocks, set retrieval.scorer=landmark and "
            f"memory.blocks=null, not {every['scorer']} and {every['max_blocks']}"
        )


def _named(name: str, settings: Mapping[str, Any]) -> str:
    """A setting as on the command line."""
    key = "model.block_size" if name == "block_size" else _NAMES.get(name, f"retrieval.{name}")
    return f"{key}={settings[name]}"


def _check_numbers(every: Mapping[str, Any]) -> None:
    """`check_settings` of whole numbers."""
    for name in ("block_size", "k", "max_blocks", "cache", "candidates", "rerank", "recent"):
        value = every[name]
        can_be_none = name in SETTINGS and SETTINGS[name] is None
        if not (value is None and can_be_none) and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"{_named(name, {name: repr(value)})}: must be a whole number")
    k, rerank = every["k"], every["rerank"]
    fewest, why_fewer = max(k, rerank or 0, 1) if every["index"] == "faiss" else 1, f" is less than retrieval.k={k}"
    for name, least, most, why in (
        ("block_size", 1, None, ": a block needs at least one token"),
        ("k", 0, None, ": the number of retrieved blocks cannot be negative"),
        ("max_blocks", max(k, 1), None, f"{why_fewer}: keep at least as many blocks as are retrieved"),
        ("cache", 1, None, ": must be at least 1, because blocks are fetched into the cache"),
        ("rerank", k, None, f"{why_fewer}: of more blocks k are chosen"),
        ("recent", 0, k, f": must be 0 to retrieval.k={k}, of which they are a part"),
        ("first", 0, k - every["recent"], f": must be 0 to retrieval.k={k} less retrieval.recent={every['recent']}"),
        ("window", 0, None, ": the number of tokens cannot be negative"),
        ("candidates", fewest, None, f": must be at least {fewest}"),
    ):
        value = every[name]
        if value is not None and (value < least or (most is not None and value > most)):
            raise UserError(f"{_named(name, every)}{why}")


def memory_of(block_size: int, settings: Mapping[str, Any], **objects: Any) -> Memory:
    """A memory with these settings.

    Args:
        block_size: ℓ, normal tokens of a block.
        settings: some of SETTINGS.
        objects: keys, gate, scoring, backend and observer, as of `Memory`; and `select`, in place of the one that
            chooses the blocks with the best landmarks.

    Raises UserError as `check_settings` does, for a `window` where the text has landmarks, for none where it has not,
    and for index="faiss" where faiss is not installed.
    """
    from landmark.attention.keys import Keys
    from landmark.memory.memory import Memory
    from landmark.memory.positions import Stingy, TruePositions
    from landmark.memory.select import Best
    from landmark.memory.store import Store
    from landmark.memory.summaries import SummaryMemory

    check_settings(settings, block_size)
    every = SETTINGS | dict(settings)
    window = every["window"]
    keys = objects.setdefault("keys", Keys(landmark="token" if window is None else "none"))
    if (window is None) != (keys.landmark != "none"):
        has = "has no landmarks" if window is None else "has landmarks"
        raise UserError(f"{_named('window', every)}: the text that this model reads {has}")
    # With the mean of their blocks in them, landmarks differ in the first layer too.
    best = objects.pop("select", Best(every["granularity"], (0,) if keys.landmark == "token" else ()))
    select = _selector(every, best)
    store = Store(every["max_blocks"], every["tier"], every["folder"], every["cache"])
    positions = Stingy() if every["mapping"] == "stingy" else TruePositions()
    objects |= {"select": select, "store": store, "positions": positions}
    if window is not None:
        return SummaryMemory(block_size, every["k"], window=window, **objects)
    return Memory(block_size, every["k"], **objects)


def _selector(settings: Mapping[str, Any], best: Best) -> Selector:
    """The selector, and around it those that change its question. best: that with landmarks."""
    from landmark.memory import select

    granularity = settings["granularity"]
    new = {
        "landmark": lambda: best,
        "recent": lambda: select.Newest(granularity),
        "random": lambda: select.Random(granularity, settings["seed"]),
        "mean_key": lambda: select.MeanKeys(granularity),
        "given": lambda: select.Given(granularity),
        "faiss": lambda: select.Faiss(settings["candidates"], settings["index_type"], best),
    }
    found: Selector = new["faiss" if settings["index"] == "faiss" else settings["scorer"]]()
    if settings["rerank"] is not None:
        found = select.SecondLook(settings["rerank"], found)
    if settings["recent"]:
        found = select.WithNewest(settings["recent"], found)
    if settings["first"]:
        found = select.WithFirst(settings["first"], found)
    return select.Cutoff(settings["cutoff"], found) if settings["cutoff"] else found
