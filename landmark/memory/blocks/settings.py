"""The settings of a cache of blocks, as one frozen dataclass. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from landmark.memory.settings import Settings
from landmark.utils.constants import MAPPINGS
from landmark.utils.setting import setting

# How files and identities have these settings: without these defaults, which are those of a memory with landmarks.
_LEFT_OUT = {
    "k": 4,
    "gates": False,
    "first": 0,
    "window": None,
    "dense": None,
    "mapping": "stingy",
    "tier": "device",
    "folder": None,
}


@dataclass(frozen=True, repr=False)
class BlockCacheSettings(Settings):
    """How a pretrained model reads without landmarks. Raises UserError, naming the key, for settings that make no
    sense. Metadata of fields are as of `MemorySettings`.
    """

    k: int = setting(128, key="retrieval.k", least=1, about="blocks that a query reads beside the window")
    granularity: str = setting(
        "per_token_and_group",
        key="retrieval.granularity",
        choices=("per_token_and_group", "per_token_and_head", "per_token", "per_head"),
        about="queries and heads that choose blocks together: heads that share keys, none, all heads, or (`per_head`) "
        "the tokens of a block, which then look ahead",
    )
    scorer: Any = setting(
        "mean_key",
        key="retrieval.scorer",
        about="what stands for a block that is not read: a name, a module with a class `Scorer`, or with settings "
        "`{name: …, …: …}`",
    )
    gates: bool = setting(
        False,
        key="retrieval.gates",
        about="weigh chosen blocks by their scores, as the paper's grouped softmax does; else all keys share a softmax",
    )
    first: int = setting(1, key="retrieval.first", least=0, about="first blocks of a text, always among the k")
    window: int = setting(512, key="memory.window", least=0, about="the last tokens, which every query reads")
    dense: int | None = setting(
        None,
        key="memory.dense",
        least=0,
        about="the first tokens of a text, which are read with all keys (`null`: while that is no slower; 0 in rows of "
        "a table)",
    )
    mapping: str = setting(
        "auto",
        key="positions.mapping",
        choices=(*MAPPINGS, "auto"),
        about="positions of blocks: true ones, the paper's, or (`auto`) true ones while they fit",
    )

    def _rules(self) -> list[tuple[str, Any, str]]:
        return [("first", self.first > self.k, f"is more than retrieval.k={self.k}, of which they are a part")]

    def saved(self) -> dict[str, Any]:
        """As files have them, for `from_saved`."""
        told = {name: value for name, value in vars(self).items() if name not in _LEFT_OUT or value != _LEFT_OUT[name]}
        scorer = self.scorer if isinstance(self.scorer, str | Mapping) else self.scorer.saved()
        return told | {"scorer": scorer}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Self:
        """The settings of a file. Raises UserError for one that only a memory with landmarks has."""
        return cls().updated({**_LEFT_OUT, **saved})
