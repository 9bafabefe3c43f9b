"""Generation of text after a prompt (`task=generate`), with statistics of time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from landmark.documents import beside_memory, documents_read
from landmark.experiment.config import Config
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.experiment.evaluation.measurement import new_memory
from landmark.models import LanguageModel
from landmark.models.sampling import Sampling
from landmark.reading.answer import Answer, Delta
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.reading.sources import Found, Source
    from landmark.reading.support import Support

Progress = Callable[[int, int], None]


@dataclass
class GenerationStatistics:
    """Time and memory of a generation. seconds_reading: until the first token. memory: its counters at the end.
    sources: the passages behind the answer. support: how far it is in them, if it was made from them alone.
    """

    tokens_read: int = 0
    seconds_reading: float = 0.0
    tokens_generated: int = 0
    seconds_generating: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    support: Support | None = None
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
    progress: Progress | None = None,
) -> Iterator[tuple[str, str]]:
    """Pieces of the text that follows `prompt_file`, as a Document, and `prompt`, as they are generated: of its
    reasoning, where the template marks it, and of the rest.

    A model of transformers gets `prompt` through its template for chats, unless `generate.template` is null. Where a
    memory can be saved, both are read in separate parts, so a saved memory of the file gives the same text. progress:
    called with tokens read, and in all. Raises UserError for a file that cannot be read, and as `Memory.load`,
    `Memory.save`, `LanguageModel.stream` and `Answering.answer`.
    """
    texts, memory = prompt_texts(config), _memory(model, config)
    reader = (_Pretrained if hasattr(model, "bare") else _Own)(model, tokenizer, config, memory, progress)
    parts = reader.ids(texts)
    statistics.tokens_read = sum(map(len, parts))
    if hasattr(memory, "save") and config.prompt_file is not None and (len(parts) > 1 or config.memory.save):
        reader.read(parts.pop(0))
        if config.memory.save is not None:
            memory.save(config.memory.save, beside_memory(reader.given, next(iter(config.memory.loaded), None)))
    ids = [token for part in parts for token in part]
    if config.generate.from_sources:
        statistics.sources = _pretrained(reader).read_sources(ids)
    if parts and config.generate.tokens:
        answer = reader.new_answer(ids)
        for delta in reader.answer(ids, answer):
            if len(answer.tokens) > statistics.tokens_generated:
                statistics.count_token()
            yield delta.reasoning, delta.text
        if config.generate.from_sources:
            statistics.support = _pretrained(reader).support(answer)
    elif parts:
        reader.read(ids)
    if not statistics.tokens_generated:
        statistics.seconds_reading = time.perf_counter() - statistics.started
    if config.generate.sources and not config.generate.from_sources:
        statistics.sources = _pretrained(reader).find(ids).sources
    statistics.memory = getattr(memory, "stats", {})


def _pretrained(reader: _Own | _Pretrained) -> _Pretrained:
    """The reader, which finds sources: a configuration with another one is refused."""
    assert isinstance(reader, _Pretrained)
    return reader


def _memory(model: LanguageModel, config: Config) -> Any:
    """The memory with which the texts are read, loaded where `memory.load` says so."""
    memory = new_memory(model, config)
    if config.memory.load is not None or config.memory.save is not None:
        if not hasattr(memory, "save"):
            raise UserError("memory.load, memory.save: only a landmark model has a memory to save")
        if len(config.memory.loaded) > 1 and not hasattr(model, "bare"):
            raise UserError("memory.load: only memories of a model of transformers are asked together, name one folder")
        if hasattr(model, "bare") and config.memory.loaded:  # it knows where its layers are
            memory.load(config.memory.loaded)
        elif config.memory.loaded:
            memory.load(config.memory.loaded[0], next(model.parameters()).device)
    return memory


class _Own:
    """How a model of ours reads and goes on."""

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, config: Config, memory: Any, progress: Progress | None
    ):
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._reading = {"local": config.eval.local, "memory": memory, "progress": progress}
        self.given = config.prompt_file

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Those of each text."""
        return [self._tokenizer.encode(text).tolist() for text in texts]

    def read(self, ids: list[int]) -> None:
        self._model.generate([ids], 0, **self._reading)

    def new_answer(self, ids: list[int]) -> Answer:
        """What follows these ids, of which nothing is there yet."""
        decode = lambda tokens: self._tokenizer.written(tokens).decode("utf-8", "replace")  # noqa: E731
        return Answer(decode, self._config.generate.stop)

    def answer(self, ids: list[int], answer: Answer) -> Iterator[Delta]:
        """Read the ids and give what follows, piece by piece. answer: is filled."""
        most = self._config.generate.tokens
        drawing = {"sampling": sampling_of(self._config), "stop": [self._tokenizer.eot]}
        for (token,) in self._model.stream([ids], most, **drawing, **self._reading):
            yield answer.add(token, is_last=len(answer.tokens) + 1 >= most)
            if answer.finish is not None:
                return
        yield answer.add(None)


class _Pretrained:
    """How a model of transformers reads and answers."""

    def __init__(self, model: Any, tokenizer: Any, config: Config, memory: Any, progress: Progress | None):
        from landmark.reading.answering import Answering

        self._answering, self._config = Answering(model.bare, tokenizer.inner, local=config.eval.local), config
        self._memory, self._progress = memory, progress
        self._read = memory.ids[0].tolist() if config.memory.loaded else []
        self._known, self.given = len(self._read), config.prompt_file
        if config.generate.finds:  # a copy of the memory will go on behind the text
            memory.marks = []
            memory.settle()
            memory.add_mark()

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Those of each text; of `prompt`, which is the last one, through the template."""
        found = list[list[int]]()
        for number, text in enumerate(texts):
            begins, is_prompt = not self._read and not number, self._config.prompt is not None and text is texts[-1]
            found.append(self._prompt_ids(text, begins) if is_prompt else self._text_ids(text, begins))
        return found

    def _text_ids(self, text: str, begins: bool) -> list[int]:
        return self._answering.checked(self._answering.chats.text_ids(text, begins))

    def _prompt_ids(self, text: str, begins: bool) -> list[int]:
        chats, settings = self._answering.chats, self._config.generate.template
        if settings is None or not chats.template:
            return self._text_ids(text, begins)
        return chats.ids([{"role": "user", "content": text}], begins, settings=settings)

    def read(self, ids: list[int]) -> None:
        self._answering.read(torch.tensor([ids]), self._memory, progress=self._progress)
        self._read += ids
        if self.given is not None:
            self.given = self.given.as_read(self._answering.chats.decode(ids))

    def new_answer(self, ids: list[int]) -> Answer:
        """As of `_Own`."""
        chats = self._answering.chats
        given = self._config.generate
        is_chat = self._config.prompt is not None and given.template is not None and bool(chats.template)
        answer = self._answering.new_answer(ids, is_chat, given.stop)
        answer.nats = [] if given.from_sources else None
        return answer

    def answer(self, ids: list[int], answer: Answer) -> Iterator[Delta]:
        """As of `_Own`."""
        sampling = sampling_of(self._config, self._answering.model)
        given = answer, sampling, self._config.generate.tokens
        return self._answering.answer([*self._read, *ids], self._memory, *given, progress=self._progress)

    def find(self, ids: list[int], alone: bool = False) -> Found:
        """The passages behind the answer to these ids, of what was read before. alone: as of `find`."""
        from landmark.reading.sources import NULL, find

        config, read = self._config, self._read
        about = self.given, config.memory.loaded, self._memory.starts, self._known
        documents = documents_read(self._answering.chats.decode, read, *about)
        given = documents, read, ids, self._prompt_ids(NULL, begins=False), config.generate.sources, alone
        return find(self._answering, self._memory, *given)

    def read_sources(self, ids: list[int]) -> list[Source]:
        """The passages for the answer to these ids. It is made from them alone, if there are some: another memory will
        read them in place of the text.
        """
        self._found = found = self.find(ids, alone=True)
        if found.text:
            self._memory, self._read = self._memory.empty(), self._answering.chats.text_ids(found.text)
        return found.sources

    def support(self, answer: Answer) -> Support | None:
        """How far an answer is in the passages that it was made from."""
        from landmark.reading.support import support

        return support(self._answering, self._found, self._prompt_ids(str(self._config.prompt), begins=True), answer)


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
