"""`task=inspect`: read a text and write a page that shows the blocks that each of its tokens retrieves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from landmark.config import Config
from landmark.config.schema import memory_settings
from landmark.data.tokenizers import Tokenizer
from landmark.evaluation.generation import prompt_texts
from landmark.inspector.page import render
from landmark.inspector.trace import trace_retrieval
from landmark.models import LanguageModel
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic


def inspect_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    config: Config,
    run: str,
    output: Path,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Read `prompt_file` and `prompt` and write the page.

    Args:
        model: a landmark model.
        tokenizer: the one it was trained with.
        config: names the text, and how it is read.
        run: name of the model's run, for the page and its file name.
        output: folder that gets `inspect/NAME.html`, unless `output_file` names another file.
        progress: called with the number of tokens read and of all tokens. None: not called.

    Returns a line that describes the file. Raises UserError if the text cannot be read or traced, or the page cannot be
    written.
    """
    tokens = tokenizer.encode("".join(prompt_texts(config)))
    tokens = np.concatenate([np.array(tokenizer.beginning, dtype=tokens.dtype), tokens])
    title = "prompt" if config.prompt_file in (None, "-") else Path(config.prompt_file).name
    path = Path(config.output_file or output / "inspect" / f"{Path(title).stem}-{run}.html")
    trace = trace_retrieval(
        model, tokens, config.eval.local or DEFAULT_CHUNK, **vars(memory_settings(config)), progress=progress
    )
    page = render(trace, tokenizer, title, _settings(model, config, run, tokens))
    try:
        write_atomic(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    size = len(page.encode()) / 1e6
    return f"{path}: {len(tokens):,} tokens, {len(tokens) // trace.block_size:,} blocks, {size:.1f} MB"


def _settings(model: LanguageModel, config: Config, run: str, tokens: np.ndarray) -> dict[str, Any]:
    """Facts about the model and the reading, for the page."""
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
        settings["cutoff"] = config.cmt.cutoff
    return settings
