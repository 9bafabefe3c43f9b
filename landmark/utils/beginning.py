"""What a tokenizer of transformers puts before a text."""

from __future__ import annotations

from typing import Any


def beginning(inner: Any) -> list[int]:
    """Ids that the tokenizer puts before a text, as its model expects it; often one, or none."""
    ids, bare = (inner("a", add_special_tokens=added)["input_ids"] for added in (True, False))
    return ids[: ids.index(bare[0])]
