"""One session: the texts that a reader's model has read, and what is asked about them, as a stream of events.

    session = Session.open("model.gguf")
    session.read("book.pdf")
    print(session.answer("Who lives in the house by the lake?"))
    session.save("book.memory")

The command line, the chat, the server with its page, the harness and notebooks are users of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from landmark.documents import Document, beside_memory, documents_read, read_document
from landmark.models.huggingface.prefixes import Saved
from landmark.models.sampling import Sampling
from landmark.reading.answer import Answer, Delta
from landmark.reading.answering import Answering, Progress, finished
from landmark.reading.chats import Chats, Messages
from landmark.reading.sources import NULL, Found, Source, check_sources, find
from landmark.reading.support import Support, support
from landmark.utils.errors import UserError
from landmark.utils.files import check_keys, read_json

CHAT = "chat.json"  # beside a saved memory: how many of its tokens come before the chat, and the messages
TOKENS = 256  # most tokens of an answer, unless told otherwise


@dataclass(frozen=True)
class Prompt:
    """What is asked: messages of a chat, or a text (or its ids) that the model goes on with.

    goes_on: the last message is the beginning of the answer. settings: of the template for chats. is_plain: names of
    special tokens in the text are ordinary text.
    """

    messages: Messages | None = None
    text: str | list[int] = ""
    goes_on: bool = False
    settings: Mapping[str, Any] | None = None
    is_plain: bool = False

    @classmethod
    def question(cls, text: str, settings: Mapping[str, Any] | None = None) -> Prompt:
        """A chat of one message."""
        return cls([{"role": "user", "content": text}], settings=settings)

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    def ids(self, answering: Answering, begins: bool, now: datetime | None = None) -> list[int]:
        """Up to the answer. begins: nothing was read before. now: as of `Chats.ids`. Raises UserError as `Chats.ids`
        and `Answering.ids`.
        """
        if self.messages is None and self.is_plain and isinstance(self.text, str):
            return answering.checked(answering.chats.text_ids(self.text, begins) if self.text else [])
        if self.messages is None:
            return answering.ids(self.text, begins)
        return answering.chats.ids(self.messages, begins, self.goes_on, self.settings, now)

    def about_nothing(self) -> Prompt:
        """The same with NULL in place of the text, or of the user's last message."""
        if self.messages is None:
            return replace(self, text=NULL)
        messages = [*self.messages]
        last = next((at for at, each in [*enumerate(messages)][::-1] if each["role"] == "user"), len(messages) - 1)
        messages[last] = {**messages[last], "content": NULL}
        return replace(self, messages=messages)


class Exchange(NamedTuple):
    """A prompt and its answer, which `Session.ask` fills. ids: of the prompt alone, up to the answer."""

    prompt: Prompt
    ids: list[int]
    answer: Answer


class Began(NamedTuple):
    """The reading of a prompt begins. prompt: its tokens; cached: those that need not be read."""

    prompt: int
    cached: int


class Passages(NamedTuple):
    """The passages of the texts behind the answer, the best first."""

    found: list[Source]


Event = Progress | Began | Delta | Passages | Support


@dataclass
class Session:
    """A model, the texts that it has read, and answers about them.

    answering: the model, which several sessions may share. owner: whose memories these are; another owner's are not
    used. ids, documents: what was read before the questions, as ids, and as texts with the character at which each
    begins. messages: of a chat that was loaded. began: when, which the model's template may write; a chat that is saved
    keeps it, so that it is the same text on another day.
    """

    answering: Answering
    owner: str = ""
    ids: list[int] = field(default_factory=list)
    documents: Callable[[], Sequence[tuple[int, Document]]] = lambda: ()
    messages: list[dict[str, str]] = field(default_factory=list)
    saved: Saved | None = None  # what is loaded where no memory is kept that has read the texts
    began: datetime = field(default_factory=datetime.now)

    def __post_init__(self) -> None:
        self._cache: Any = None  # the memory that has answered, or read, last
        self._loaded: list[Path] = []
        self._read: Document | None = None

    @classmethod
    def open(cls, model: str | Path, bits: int | None = None, memory: Mapping[str, Any] | None = None) -> Session:
        """A session with a model of transformers: its folder, its name on the hub, or a .gguf file.

        bits: 4 or 8, of a folder's weights (None: as they are). memory: settings of `BlockCacheSettings`, as {"k": 64}.
        Raises UserError where there is no such model, or it cannot read blocks.
        """
        from landmark.models.huggingface import load

        answering = Answering(*load(model, bits, dtype="auto"))
        answering.prefixes.settings = dict(memory or {})
        return cls(answering)

    @property
    def chats(self) -> Chats:
        return self.answering.chats

    @property
    def has_read(self) -> bool:
        """Whether there is something to save."""
        return self._cache is not None

    def read(self, document: Document | str | Path) -> None:
        """Read a document, or a file, behind what was read before. Raises UserError as `read_document`."""
        finished(self.reading(document if isinstance(document, Document) else read_document(str(document))))

    def reading(self, document: Document) -> Generator[Progress, None, None]:
        """`read`, with a sign of life after each piece."""
        if self._read is not None:
            raise UserError("a session reads one document, which may be several joined ones, behind what it has loaded")
        known, ids = len(self.ids), self.chats.text_ids(document.text, not self.ids)
        self.ids = self.answering.checked([*self.ids, *ids])
        self._read = document.as_read(self.chats.decode(ids))
        about = self._read, self._loaded, (0,) if self.saved is None else self.saved.starts, known
        self.documents = lambda: documents_read(self.chats.decode, self.ids, *about)
        with self._using([*self.ids, -1]) as self._cache:
            yield from self._rest(self.ids, of_answer=False)

    def load(self, folders: str | Path | Sequence[str | Path]) -> Self:
        """Go on from a saved memory, or from several, which are asked together. Raises UserError as `LandmarkCache`."""
        self._loaded = [Path(each) for each in ([folders] if isinstance(folders, (str, Path)) else folders)]

        def load() -> Any:
            cache = self.answering.new_memory()
            cache.load(self._loaded)
            return cache

        self._cache = load()
        self.answering.prefixes.add(self._cache, self.owner)
        self.ids, file = self._cache.ids[0].tolist(), self._loaded[0] / CHAT
        if len(self._loaded) == 1 and file.is_file():  # of several, chats are texts too
            saved = read_json(file, {"before": int, "messages": list})
            for message in saved["messages"]:
                check_keys(message, {"role": str, "content": str}, f"{file}: a message", "save the memory again")
            self.ids, self.messages = self.ids[: saved["before"]], saved["messages"]
            try:
                self.began = datetime.fromisoformat(saved.get("began", self.began.isoformat()))
            except (TypeError, ValueError):
                said = f"{file}: began is {saved['began']!r}, which is no time"
                raise UserError(f"{said}: save the memory again") from None
        self.saved = saved = Saved(len(self.ids), self._cache.ends, load)
        self.documents = lambda: documents_read(self.chats.decode, self.ids, None, self._loaded, saved.starts)
        return self

    def save(self, folder: str | Path) -> None:
        """Write the memory, the places of its documents and the chat, for `load`. Raises UserError as
        `LandmarkCache.save`.
        """
        if self._cache is None:
            raise UserError("there is nothing to save: nothing was read")
        chat = {"before": len(self.ids), "messages": self.messages, "began": self.began.isoformat()}
        others = (
            {CHAT: json.dumps(chat).encode()} if self.messages or self._cache.get_seq_length() > len(self.ids) else {}
        )
        self._cache.save(folder, others | beside_memory(self._read, next(iter(self._loaded), None)))

    @property
    def stats(self) -> dict[str, Any]:
        """The counters of the memory that has read or answered last."""
        return getattr(self._cache, "stats", {})

    def answer(self, question: str, tokens: int = TOKENS) -> str:
        """The whole answer to a question."""
        events = self.ask(self.exchange(Prompt.question(question)), tokens=tokens)
        return "".join(each.text for each in events if isinstance(each, Delta))

    def exchange(self, prompt: Prompt, stop: Sequence[str] = ()) -> Exchange:
        """A prompt behind what was read, for `ask`. stop: texts that end the answer. Raises UserError for a prompt
        without text.
        """
        own = self._ids(prompt, begins=not self.ids)
        return Exchange(prompt, own, self.answering.new_answer([*self.ids, *own], prompt.is_chat, stop))

    def ask(
        self,
        exchange: Exchange,
        sampling: Sampling | None = None,
        tokens: int = TOKENS,
        passages: int = 0,
        from_passages: bool = False,
        gone: threading.Event | None = None,
    ) -> Generator[Event, None, None]:
        """Answer a question about what was read; the next question begins there again.

        1. With `from_passages` the passages are found first, and take the place of the texts. Behind the answer comes
           how far it is in them.
        2. The memory that has read the longest beginning reads the rest, and the answer is generated.
        3. Otherwise `passages` are found by the memory that has answered.

        Args:
            sampling: how tokens are chosen (None: the most probable one).
            tokens: most tokens of the answer.
            passages: most passages that come with it (0: none, or three with `from_passages`).
            gone: set where nobody waits any more.

        Raises UserError for passages where the model finds none; Gone.
        """
        if passages or from_passages:
            check_sources(self.answering.model)
        with self.answering.turns.answering():
            yield from self._asked(exchange, sampling or Sampling(), tokens, passages, from_passages, gone)

    def _asked(
        self,
        exchange: Exchange,
        sampling: Sampling,
        tokens: int,
        passages: int,
        from_passages: bool,
        gone: threading.Event | None,
    ) -> Iterator[Event]:
        prompt, own, answer = exchange
        ids, in_text, found = [*self.ids, *own], True, Found([])
        if from_passages and self.ids:
            with self._using(ids) as self._cache:
                yield from self._rest(self.ids, gone)
                found = self._find(prompt, own, passages, True, gone)
            yield Passages(found.sources)
            if found.text:
                ids, in_text, answer.nats = [*self.chats.text_ids(found.text), *own], False, []
        with self._using(ids, in_text) as cache:
            self._cache = cache if in_text else self._cache
            yield Began(len(ids), cache.get_seq_length())
            yield from self.answering.answer(ids, cache, answer, sampling, tokens, gone)
            if passages and not from_passages:
                yield Passages(self._find(prompt, own, passages, False, gone).sources)
        if measured := support(found, answer):
            yield measured

    def passages(self, prompt: Prompt, most: int, gone: threading.Event | None = None) -> list[Source]:
        """The passages behind the answer to a prompt that was asked last. Raises UserError where nothing was read."""
        if not self.ids or self._cache is None:
            raise UserError("passages are of the texts that were read before the question: there is none")
        return self._find(prompt, self._ids(prompt, begins=False), most, False, gone).sources

    def _find(self, prompt: Prompt, own: list[int], most: int, alone: bool, gone: threading.Event | None) -> Found:
        """As `find`. own: the ids of the prompt."""
        if not self.ids:
            return Found([])
        null = self._ids(prompt.about_nothing(), begins=False)
        return find(self.answering, self._cache, self.documents(), self.ids, own, null, most, alone, gone)

    def _ids(self, prompt: Prompt, begins: bool) -> list[int]:
        return prompt.ids(self.answering, begins, self.began)

    def _using(self, ids: list[int], in_text: bool = True) -> Any:
        """The memory that has read most of these ids, for one reader at a time. in_text: they begin with `self.ids`."""
        return self.answering.using(ids, self.owner, self.saved if in_text else None)

    def _rest(self, ids: list[int], gone: threading.Event | None = None, of_answer: bool = True) -> Iterator[Progress]:
        """Read those of the ids that the memory has not read. of_answer: as of `Answering.read`."""
        if rest := ids[self._cache.get_seq_length() :]:
            yield from self.answering.read(torch.tensor([rest]), self._cache, gone, of_answer)
