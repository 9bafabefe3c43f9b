"""`task=inspect`: a text is read, and a page is written that shows what was retrieved for each of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from landmark.config import Config
from landmark.data.tokenizer import Tokenizer
from landmark.evaluation.generation import prompt_texts
from landmark.evaluation.memories import memory_settings
from landmark.inspector.page import render
from landmark.inspector.reading import read
from landmark.models import Decoder
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic


def inspect_text(
    model: Decoder,
    tokenizer: Tokenizer,
    config: Config,
    run: str,
    output: Path,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Read `prompt_file` and `prompt` and write the page. run: the name of the model's. Returns what was written.

    Raises UserError where the text cannot be read, as `landmark.inspector.reading.read`, or the page not be written.
    """
    tokens = tokenizer.encode("".join(prompt_texts(config)))
    title = "prompt" if config.prompt_file in (None, "-") else Path(config.prompt_file).name
    path = Path(config.output_file or output / "inspect" / f"{Path(title).stem}-{run}.html")
    reading = read(model, tokens, config.eval.local or DEFAULT_CHUNK, **memory_settings(config), progress=progress)
    page = render(reading, tokenizer, title, _settings(model, config, run, tokens))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    size = len(page.encode()) / 1e6
    return f"{path}: {len(tokens):,} tokens, {len(tokens) // reading.block_size:,} blocks, {size:.1f} MB"


def _settings(model: Decoder, config: Config, run: str, tokens: np.ndarray) -> dict[str, Any]:
    """What the page says of the model and how it read."""
    retrieval, memory, shape = config.retrieval, config.memory, model.config
    settings = {
        "run": run,
        "tokens": f"{len(tokens):,}",
        "blocks of": shape.block_size,
        "chunks of": config.eval.local or DEFAULT_CHUNK,
        "k": retrieval.k,
        "chosen": retrieval.granularity.replace("_", " "),
    }
    if retrieval.scorer != "landmark":
        settings["by"] = retrieval.scorer
    if memory.blocks is not None:
        settings["blocks kept"] = memory.blocks
    if shape.cmt:
        settings["cutoff"] = config.cmt.cutoffs or config.cmt.cutoff
    return settings
