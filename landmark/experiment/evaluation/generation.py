"""Generation of text after a prompt (`task=generate`), with statistics of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from landmark.documents import beside_memory
from landmark.experiment.config import Config
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.experiment.evaluation.measurement import new_memory
from landmark.models import LanguageModel
from landmark.models.sampling import Sampling
from landmark.reading.answer import Answer
from landmark.utils.errors import UserError

Progress = Callable[[int, int], None]


@dataclass
class GenerationStatistics:
    """Time and memory of a generation. seconds_reading: until the first token. memory: its counters at the end."""

    tokens_read: int = 0
    seconds_reading: float = 0.0
    tokens_generated: int = 0
    seconds_generating: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def count(self, tokens: int) -> None:
        """So many tokens are generated now; 0: the prompt is read."""
        now = time.perf_counter() - self.started
        if self.tokens_generated == 0:
            self.seconds_reading = now
        self.seconds_generating, self.tokens_generated = now - self.seconds_reading, tokens


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    config: Config,
    statistics: GenerationStatistics,
    progress: Progress | None = None,
) -> Iterator[str]:
    """Pieces of the text that follows `prompt_file`, as a Document, and `prompt`, as a model of ours generates them.

    Where a memory can be saved, both are read in separate parts, so a saved memory of the file gives the same text.
    progress: called with tokens read, and in all. Raises UserError as `Memory.load`, `Memory.save` and
    `LanguageModel.stream`.
    """
    memory, given, most = _memory(model, config), config.generate, config.generate.tokens
    parts = [tokenizer.encode(text).tolist() for text in prompt_texts(config)]
    statistics.tokens_read = sum(map(len, parts))
    reading = {"local": config.eval.local, "memory": memory, "progress": progress}
    if hasattr(memory, "save") and config.prompt_file is not None and (len(parts) > 1 or config.memory.save):
        model.generate([parts.pop(0)], 0, **reading)
        if config.memory.save is not None:
            memory.save(config.memory.save, beside_memory(config.prompt_file, next(iter(config.memory.loaded), None)))
    if parts:
        ids = [token for part in parts for token in part]
        answer = Answer(lambda tokens: tokenizer.written(tokens).decode("utf-8", "replace"), given.stop)
        drawing = {"sampling": sampling_of(config), "stop": [tokenizer.eot]}
        for (token,) in model.stream([ids], most, **drawing, **reading):
            piece = answer.add(token, is_last=len(answer.tokens) + 1 >= most)
            statistics.count(len(answer.tokens))
            yield piece.text
            if answer.finish is not None:
                break
        else:
            yield answer.add(None).text
    statistics.memory = getattr(memory, "stats", {})


def _memory(model: LanguageModel, config: Config) -> Any:
    """The memory with which the texts are read, loaded where `memory.load` says so."""
    memory = new_memory(model, config)
    if config.memory.load is not None or config.memory.save is not None:
        if not hasattr(memory, "save"):
            raise UserError("memory.load, memory.save: only a landmark model has a memory to save")
        if len(config.memory.loaded) > 1:
            raise UserError("memory.load: only memories of a model of transformers are asked together, name one folder")
        if config.memory.loaded:
            memory.load(config.memory.loaded[0], next(model.parameters()).device)
    return memory


def sampling_of(config: Config, model: Any = None) -> Sampling:
    """How `task=generate` and `task=chat` choose tokens. model: of transformers, whose recommendations count where
    `generate.defaults=model`.
    """
    given = config.generate
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
    recommended = model.generation_config if model is not None and given.defaults == "model" else None
    return Sampling.from_config(recommended, **{name: getattr(given, name) for name in names}, seed=config.seed)


def prompt_texts(config: Config) -> list[str]:
    """The text of `prompt_file`, if it is set, and `prompt`."""
    texts = [] if config.prompt_file is None else [config.prompt_file.text]
    return texts if config.prompt is None else [*texts, config.prompt]
