"""The settings of a memory: what is refused, what is saved, and the page that lists them."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from landmark.memory.settings import TRAINING_FREE, MemorySettings
from landmark.utils.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": -1}, "retrieval.k=-1: must be at least 0"),
        ({"k": "4"}, "retrieval.k='4': must be a whole number"),
        ({"k": None}, "retrieval.k=null: must have a value"),
        ({"kk": 4}, "memory has no setting kk: it has cache, "),
        ({"max_blocks": 3}, "memory.blocks=3: is less than retrieval.k=4"),
        ({"max_blocks": 9.5}, "memory.blocks=9.5: must be a whole number"),
        ({"granularity": "per_block"}, "retrieval.granularity=per_block: must be one of per_token_and_head, "),
        ({"scorer": "best"}, "retrieval.scorer=best: must be one of landmark, "),
        ({"cutoff": 1.5}, "cmt.cutoff=1.5: must be at least 0 and at most 1"),
        ({"cutoff": "low"}, "cmt.cutoff='low': must be a number"),
        ({"mapping": "lavish"}, "positions.mapping=lavish: must be one of stingy, true, auto"),
        ({"mapping": "auto"}, "positions.mapping=auto: is for texts without landmarks"),
        ({"cache": 0}, "memory.cache=0: must be at least 1"),
        ({"rerank": 3}, "retrieval.rerank=3: is less than retrieval.k=4"),
        ({"rerank": 8, "granularity": "per_head"}, "rerank=8: chooses for .*, not retrieval.granularity=per_head"),
        ({"rerank": 8, "scorer": "recent"}, "rerank=8: looks again at the best .*, and retrieval.scorer=recent has"),
        ({"first": 1}, "retrieval.first=1: is for texts without landmarks"),
        ({"index": "annoy"}, "memory.index=annoy: must be one of exact, faiss"),
        ({"index": "faiss", "granularity": "per_token"}, "memory.index=faiss: chooses for each query and head, not"),
        ({"index": "faiss", "max_blocks": 9}, "memory.index=faiss: cannot drop blocks, not memory.blocks=9"),
        ({"index": "faiss", "scorer": "mean_key"}, "index=faiss: ranks by landmarks, not retrieval.scorer=mean_key"),
        ({"window": 9}, "retrieval.scorer=landmark: the text has no landmarks"),
        ({"window": 9, "scorer": "mean_key", "cutoff": 0.1}, "cmt.cutoff=0.1: the text has no landmarks"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        MemorySettings().updated(settings)


@pytest.mark.parametrize("settings", [MemorySettings(), MemorySettings(k=2, cutoff=0.1), TRAINING_FREE])
def test_what_is_saved_are_the_settings_that_are_not_the_default(settings):
    saved = json.loads(json.dumps(settings.saved()))
    assert MemorySettings(**saved) == settings
    assert len(saved) < 8


def test_a_rerank_that_was_not_given_is_raised_to_a_k_that_is():
    settings = MemorySettings(rerank=64)
    assert (settings.updated({"k": 100}).rerank, settings.updated({"k": 9}).rerank) == (100, 64)
    with pytest.raises(UserError, match="retrieval.rerank=64: is less than retrieval.k=100"):
        settings.updated({"k": 100, "rerank": 64})


def lines_of_the_page() -> list[str]:
    """A line for each setting, as docs/settings.md has it."""
    lines = []
    for item in fields(MemorySettings):
        said, usual = item.metadata, "null" if item.default is None else item.default
        others = ", ".join(f"`{each}`" for each in said.get("choices", ()) if each != usual)
        needed = ""
        if "needs" in said:
            other, values = said["needs"]
            needed = f"; for `{MemorySettings.__dataclass_fields__[other].metadata['key']}={'`, `'.join(values)}`"
        of_python = f", in Python `{item.name}`" if not said["key"].endswith(f".{item.name}") else ""
        lines.append(
            f"| `{said['key']}`{of_python} | `{usual}`{', ' * bool(others)}{others} | {said['about']}{needed} |"
        )
    return [line for line in lines if not line.startswith("| `seed`")]


def test_the_page_of_settings_has_them_all():
    table = "\n".join(lines_of_the_page())
    assert table in PAGE.read_text(encoding="utf-8"), f"put these lines into docs/settings.md:\n{table}"
