"""The settings of a memory, as one frozen dataclass; `landmark.memory.memory` makes what they stand for.

Hydra's groups, `model.new_memory(…)`, `wrap(memory=…)`, saved models, checks, identities and the table in
docs/settings.md are made from its fields: a new setting is a field, and the code that uses it. Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from landmark.utils.errors import UserError
from landmark.utils.setting import check_field, setting

GRANULARITIES = ("per_token_and_head", "per_token_and_group", "per_head", "per_token")
SCORERS = ("landmark", "recent", "random", "mean_key", "given")
TIERS = ("device", "cpu", "disk")
INDICES = ("exact", "faiss")
MAPPINGS = ("stingy", "true")


@dataclass(frozen=True, repr=False)
class MemorySettings:
    """How a landmark model reads. Raises UserError, naming the key, for settings that make no sense.

    A default never changes, because identities and saved files leave it out. Of each field its metadata say:

    - `key`: its name on the command line. `about`: its line in docs/settings.md.
    - `choices`, `least`, `most`: its values. `needs`: another field, and the values with which it has an effect.
    - `in_identity`: False where it does not change a row's numbers, or where the identity has it in another way.
    """

    k: int = setting(4, key="retrieval.k", least=0, about="blocks that a query retrieves, or fewer if there are fewer")
    granularity: str = setting(
        "per_token_and_head",
        key="retrieval.granularity",
        choices=GRANULARITIES,
        about="queries and heads that choose blocks together; a `group` are heads that share keys",
    )
    scorer: str = setting(
        "landmark",
        key="retrieval.scorer",
        choices=SCORERS,
        about="what ranks blocks: landmarks or the means of keys; for ablations age, chance, or (`given`, with "
        "`eval.task`) whether a block states the answer",
    )
    rerank: int | None = setting(
        None,
        key="retrieval.rerank",
        about="with landmarks: blocks with the best scores, of which k are taken by their tokens too "
        "([why](beyond_the_paper.md#a-second-look))",
    )
    first: int = setting(0, key="retrieval.first", least=0, about="without landmarks: first blocks, always among the k")
    max_blocks: int | None = setting(
        None, key="memory.blocks", about="most blocks of a layer, the oldest are dropped first (`null`: all)"
    )
    tier: str = setting(
        "device",
        key="memory.tier",
        choices=TIERS,
        in_identity=False,
        about="where blocks are kept: `cpu` is pinned memory, `disk` are files; results are the same, bit for bit",
    )
    folder: str | None = setting(
        None,
        key="memory.folder",
        needs=("tier", ("disk",)),
        in_identity=False,
        about="where these files lie (`null`: the system's folder for temporary files)",
    )
    cache: int = setting(
        128,
        key="memory.cache",
        least=1,
        needs=("tier", ("cpu", "disk")),
        in_identity=False,
        about="fetched blocks of a layer, all heads, that the device holds",
    )
    index: str = setting(
        "exact",
        key="memory.index",
        choices=INDICES,
        about="`exact` scans all landmarks; `faiss` finds 16 blocks, or k, for each query by an inverted file of FAISS",
    )
    window: int | None = setting(
        None, key="memory.window", least=0, about="without landmarks: the last tokens, which every query reads"
    )
    dense: int | None = setting(
        None,
        key="memory.dense",
        least=0,
        about="without landmarks: the first tokens of a text, which are read with all keys (`null`: while that is no "
        "slower; 0 in rows of a table)",
    )
    mapping: str = setting(
        "stingy",
        key="positions.mapping",
        choices=(*MAPPINGS, "auto"),
        about="positions of retrieved blocks: the paper's or true ones; `auto`, without landmarks: true while they fit",
    )
    cutoff: float = setting(
        0.0,
        key="cmt.cutoff",
        least=0,
        most=1,
        in_identity=False,
        about="a query retrieves if the context miss token has at least this weight",
    )
    seed: int = setting(0, key="seed", in_identity=False, about="of the scorer `random`")

    def __post_init__(self) -> None:
        for item in fields(self):
            key, value = item.metadata["key"], getattr(self, item.name)
            if value is None and item.default is not None:
                raise UserError(f"{key}=null: must have a value")
            check_field(key, value, item)
        if isinstance(self.cutoff, list | tuple):
            raise UserError(f"{self.shown('cutoff')}: must be a number")
        object.__setattr__(self, "cutoff", float(self.cutoff))
        for name, is_wrong, why in self._rules():
            if is_wrong:
                raise UserError(f"{self.shown(name)}: {why}")

    def _rules(self) -> list[tuple[str, Any, str]]:
        """What settings must be to each other: the one to name, whether it is wrong, and why."""
        k, rerank, blocks, has_landmarks = self.k, self.rerank, self.max_blocks, self.window is None
        by_index, by_score = self.index != "exact", self.scorer in ("landmark", "mean_key")
        ranker, grained = self.shown("index" if by_index else "scorer"), self.shown("granularity")
        few = f"is less than retrieval.k={k}"
        alone, without = self.granularity == "per_token_and_head", "is for texts without landmarks"
        together, in_groups = not self.granularity.startswith("per_token_and_"), self.granularity == GRANULARITIES[1]
        return [
            ("max_blocks", blocks is not None and blocks < max(k, 1), few),
            ("k", not k and not has_landmarks, "without landmarks at least one block is read beside the window"),
            ("rerank", rerank is not None and rerank < k, few),
            ("rerank", rerank is not None and not has_landmarks, "looks again at landmarks' choice, and here are none"),
            ("first", self.first > k, f"is more than retrieval.k={k}, of which they are a part"),
            ("rerank", rerank is not None and not by_score, f"looks again at the best blocks, and {ranker} has none"),
            ("rerank", rerank is not None and together, f"chooses for each query, and head or group, not {grained}"),
            ("first", self.first and has_landmarks, without),
            ("index", by_index and self.scorer != "landmark", f"ranks by landmarks, not {self.shown('scorer')}"),
            ("index", by_index and not alone, f"chooses for each query and head, not {grained}"),
            ("index", by_index and blocks is not None, f"cannot drop blocks, not {self.shown('max_blocks')}"),
            ("mapping", self.mapping == "auto" and has_landmarks, without),
            ("scorer", self.scorer != "mean_key" and not has_landmarks, "the text has no landmarks, set mean_key"),
            ("cutoff", self.cutoff and not has_landmarks, "the text has no landmarks, and no context miss token"),
            ("dense", self.dense is not None and has_landmarks, without),
            ("granularity", not has_landmarks and not in_groups, "without landmarks set per_token_and_group"),
            (
                "granularity",
                not alone and self.scorer == "recent",
                "the last blocks are the same for all, leave it out",
            ),
            ("max_blocks", blocks is not None and not has_landmarks, "without landmarks all keys are kept"),
        ]

    def shown(self, name: str) -> str:
        """A setting as on the command line: retrieval.k=4."""
        key, value = self.__dataclass_fields__[name].metadata["key"], getattr(self, name)
        return f"{key}={'null' if value is None else value}"

    def updated(self, given: Mapping[str, Any]) -> "MemorySettings":
        """These settings with others in their place. Raises UserError for a name that is no setting's."""
        if unknown := sorted(given.keys() - {item.name for item in fields(self)}):
            known = ", ".join(sorted(item.name for item in fields(self)))
            raise UserError(f"memory has no setting {', '.join(unknown)}: it has {known}")
        return replace(self, **given)

    def __repr__(self) -> str:
        return f"MemorySettings({', '.join(f'{name}={value!r}' for name, value in self.saved().items())})"

    def saved(self) -> dict[str, Any]:
        """The settings other than the defaults, as files have them: `MemorySettings(**saved)` are the same."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}


TRAINING_FREE = MemorySettings(  # of models that read without landmarks, where nothing was trained
    k=128, granularity="per_token_and_group", scorer="mean_key", first=1, window=512, mapping="auto"
)
