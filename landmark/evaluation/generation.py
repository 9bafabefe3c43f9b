"""Generation of text after a prompt (`task=generate`), with statistics of time and memory."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from landmark.config import Config
from landmark.data.tokenizers import Tokenizer
from landmark.documents import beside_memory
from landmark.evaluation.measurement import new_memory
from landmark.models import LanguageModel
from landmark.models.language_model import Sampling
from landmark.utils.chats import Chats, Separation
from landmark.utils.errors import UserError


@dataclass
class GenerationStatistics:
    """Time and memory of a generation. seconds_reading: until the first token. memory: its counters at the end."""

    tokens_read: int = 0
    seconds_reading: float = 0.0
    tokens_generated: int = 0
    seconds_generating: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def count_token(self) -> None:
        now = time.perf_counter() - self.started
        if self.tokens_generated == 0:
            self.seconds_reading = now
        self.seconds_generating = now - self.seconds_reading
        self.tokens_generated += 1


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    config: Config,
    statistics: GenerationStatistics,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[str, str]]:
    """Pieces of the text that follows `prompt_file`, as a Document, and `prompt`, as they are generated: of its
    reasoning, where the template marks it, and of the rest.

    A model of transformers gets `prompt` through its template for chats, unless `generate.template` is null. With a
    landmark memory both are read in separate chunks, so a saved memory of the file gives the same text. progress:
    called with tokens read, and in all. Raises UserError as `Memory.load`, `Memory.save` and
    `LanguageModel.stream`.
    """
    settings = config.generate
    texts, memory = prompt_texts(config), new_memory(model, config)
    if config.memory.load is not None or config.memory.save is not None:
        if not hasattr(memory, "save"):
            raise UserError("memory.load, memory.save: only a landmark model has a memory to save")
        if config.memory.load is not None:
            # A model of transformers knows where its layers are.
            memory.load(config.memory.load, *([] if hasattr(model, "bare") else [next(model.parameters()).device]))
    parts = [tokenizer.encode(text).astype(np.int64) for text in texts]
    if config.memory.load is None and tokenizer.beginning:
        parts[0] = np.concatenate([tokenizer.beginning, parts[0]])
    inner, separation = getattr(tokenizer, "inner", None), Separation()  # inner: of a model of transformers
    if config.prompt is not None and settings.template is not None and getattr(inner, "chat_template", None):
        begins, chats = len(texts) == 1 and config.memory.load is None, Chats(inner)
        asked = chats.ids([{"role": "user", "content": config.prompt}], begins, **settings.template)
        parts[-1], separation = np.array(asked, dtype=np.int64), Separation(chats, chats.opens_reasoning(asked))
    stop = [tokenizer.eot, *(_stop_token(text, tokenizer) for text in settings.stop)]
    reading = {"local": config.eval.local, "memory": memory, "progress": progress}
    statistics.tokens_read = sum(map(len, parts))
    if hasattr(memory, "save") and config.prompt_file is not None and (len(parts) > 1 or config.memory.save):
        model.generate(parts[:1], 0, **reading)
        parts = parts[1:]
        if config.memory.save is not None:
            memory.save(config.memory.save, beside_memory(config.prompt_file, config.memory.load))
    if parts and settings.tokens:
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, config.seed)
        characters, answer = codecs.getincrementaldecoder("utf-8")("replace"), ""
        steps = model.stream([np.concatenate(parts)], settings.tokens, sampling=sampling, stop=stop, **reading)
        for tokens in steps:
            statistics.count_token()
            answer += characters.decode(tokenizer.written([token for token in tokens if token is not None]))
            yield separation.more(answer)
        yield separation.more(answer + characters.decode(b"", final=True), whole=True)
    else:
        if parts:
            model.generate(parts, 0, **reading)
        statistics.seconds_reading = time.perf_counter() - statistics.started
    statistics.memory = getattr(memory, "stats", {})


def prompt_texts(config: Config) -> list[str]:
    """The text of `prompt_file`, if it is set, and `prompt`."""
    texts = [] if config.prompt_file is None else [config.prompt_file.text]
    return texts if config.prompt is None else [*texts, config.prompt]


def _stop_token(text: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise UserError(f"generate.stop: {text!r} is {len(ids)} tokens of tokenizer={tokenizer.name}, it must be one")
    return int(ids[0])
