"""The settings of a memory with landmarks, as one frozen dataclass; `memory.py` makes what they stand for.

Hydra's groups, `model.new_memory(…)`, `wrap(memory=…)`, saved models, checks, identities and the table in
docs/settings.md are made from its fields: a new setting is a field, and the code that uses it. Loads no torch.
"""

from dataclasses import dataclass
from typing import Any

from landmark.memory.settings import Settings
from landmark.utils.constants import MAPPINGS
from landmark.utils.errors import UserError
from landmark.utils.setting import setting

GRANULARITIES = ("per_token_and_head", "per_token_and_group", "per_head", "per_token")
SCORERS = ("landmark", "recent", "random", "mean_key", "given")
INDICES = ("exact", "faiss")


@dataclass(frozen=True, repr=False)
class MemorySettings(Settings):
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
        about="blocks with the best scores, of which k are taken by their tokens too "
        "([why](beyond_the_paper.md#a-second-look))",
    )
    max_blocks: int | None = setting(
        None, key="memory.blocks", about="most blocks of a layer, the oldest are dropped first (`null`: all)"
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
    mapping: str = setting(
        "stingy",
        key="positions.mapping",
        choices=MAPPINGS,
        about="positions of retrieved blocks: the paper's or true ones",
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
        if isinstance(self.cutoff, list | tuple):
            raise UserError(f"{self.shown('cutoff')}: must be a number")
        super().__post_init__()
        object.__setattr__(self, "cutoff", float(self.cutoff))

    def _rules(self) -> list[tuple[str, Any, str]]:
        k, rerank, blocks = self.k, self.rerank, self.max_blocks
        by_index, by_score = self.index != "exact", self.scorer in ("landmark", "mean_key")
        ranker, grained = self.shown("index" if by_index else "scorer"), self.shown("granularity")
        few = f"is less than retrieval.k={k}"
        alone, together = self.granularity == "per_token_and_head", not self.granularity.startswith("per_token_and_")
        newest = self.scorer == "recent"
        return [
            ("granularity", newest and not alone, "the last blocks are the same for all, leave it out"),
            ("max_blocks", blocks is not None and blocks < max(k, 1), few),
            ("rerank", rerank is not None and rerank < k, few),
            ("rerank", rerank is not None and not by_score, f"looks again at the best blocks, and {ranker} has none"),
            ("rerank", rerank is not None and together, f"chooses for each query, and head or group, not {grained}"),
            ("index", by_index and self.scorer != "landmark", f"ranks by landmarks, not {self.shown('scorer')}"),
            ("index", by_index and not alone, f"chooses for each query and head, not {grained}"),
            ("index", by_index and blocks is not None, f"cannot drop blocks, not {self.shown('max_blocks')}"),
        ]
