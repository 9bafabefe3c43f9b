"""The chunks in which a segment is read, and the number of keys that its queries attend to. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from landmark.experiment.config.schema import memory_settings
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.utils.errors import UserError
from landmark.utils.flops import keys_per_query

if TYPE_CHECKING:
    from landmark.experiment.config import Config
    from landmark.models.config import DecoderConfig


def chunk_length(model: DecoderConfig, length: int, local: int | None, kept: int | None = None) -> int:
    """Tokens that a model reads at a time. length: of a segment. local: `eval.local` (None: Transformer-XL's window,
    else all). kept: see `kept_tokens`. Raises UserError for settings that do not fit the model or the segment.
    """
    if local is not None and local > length:
        raise UserError(f"eval.local={local} is longer than eval.length={length}: chunks are parts of a segment")
    if model.kind == "transformer" and local not in (None, length) and kept is None:
        raise UserError(
            f"eval.local={local}: a plain transformer keeps no memory between chunks; set memory.window, or "
            f"eval.length={local} to evaluate it on segments of {local}"
        )
    if model.kind == "transformer_xl":
        return local or min(length, model.window or length)
    return local or length


def kept_tokens(config: Config) -> int | None:
    """Tokens that a plain transformer keeps between chunks: all in transformers' cache, window and sinks, or None."""
    if config.model.name is not None:
        return config.eval.length
    return None if config.memory.window is None else config.memory.sinks + config.memory.window


def penultimate_chunk_start(model: DecoderConfig, config: Config, length: int, local: int) -> int:
    """The first position, landmarks included, of a segment's penultimate chunk, whose retrievals are counted.

    length: of a segment. local: of a chunk. Raises UserError if there are no blocks to retrieve before it, or, without
    landmarks, no more than k.
    """
    start, block, k = (-(-length // local) - 2) * local, model.block_size, config.retrieval.k
    least, width, few = block or 0, (block or 0) + 1, "no blocks to retrieve"
    if config.model.as_is and block is not None:
        settings = memory_settings(config)
        assert isinstance(settings, BlockCacheSettings)
        window, few = -(-settings.window // block) * block, "no more blocks to choose from than are read"
        least, width = max(window + (k + 1) * block, settings.dense or 0), block
    if k == 0 or block is None or start < least:
        raise UserError(
            f"eval.task=unique_blocks: the last chunk but one of eval.length={length} tokens, "
            f"eval.local={local} at a time, has {few} (retrieval.k={k})"
        )
    return start // block * width + start % block


def attention_size(
    model: DecoderConfig, config: Config, length: int, local: int, dropped: float = 0.0
) -> tuple[float, float]:
    """Keys of normal tokens attended to, and other keys scored, means over the queries of a segment. local: tokens of a
    chunk. dropped: share of lookups that the context miss token drops.
    """
    memory, block = config.memory, model.block_size
    if model.masked:
        if block is None:
            return length, 0.0
        return min(length, (1 + config.retrieval.k) * block), max(0, length // block - 1)
    if model.kind != "landmark" or block is None:
        kept = model.recurrence.cache if model.recurrence else 0
        if model.kind == "transformer":
            kept = kept_tokens(config) or 0
        return keys_per_query(length, local, kept), 0.0
    if config.model.as_is:
        settings = memory_settings(config)
        assert isinstance(settings, BlockCacheSettings)
        return _without_landmarks(block, settings, length)
    keys = scored = 0
    for start in range(0, length, local):
        queries = min(local, length - start)
        blocks = start // block
        pending = start - blocks * block
        kept = blocks if memory.blocks is None else min(blocks, memory.blocks)
        keys += queries * (queries + 1) // 2
        keys += queries * (pending + (1 - dropped) * min(config.retrieval.k, kept) * block)
        scored += queries * (1 - dropped) * (kept if config.retrieval.scorer in ("landmark", "mean_key") else 0)
        if (proposed := min(config.retrieval.rerank or 0, kept)) > config.retrieval.k:
            scored += queries * (1 - dropped) * proposed * block
        scored += sum((pending + query) // block for query in range(queries))
    return keys / length, scored / length


def _without_landmarks(block: int, settings: BlockCacheSettings, length: int) -> tuple[float, float]:
    """`attention_size` of a text without landmarks (`landmark.memory.blocks.attention`)."""
    keys = scored = 0
    window = -(-settings.window // block) * block
    for start in range(0, length, block):
        queries, far = min(block, length - start), max(0, start - window) // block
        if far <= settings.k or start < (settings.dense or 0):
            keys += queries * start
        else:
            keys += queries * (start - (far - settings.k) * block)
            scored += queries * far
        keys += queries * (queries + 1) // 2
    return keys / length, scored / length
