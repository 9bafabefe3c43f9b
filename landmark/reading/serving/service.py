"""What the server's routes do: answers, documents, and how far a text is read."""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections.abc import Generator, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import PurePath
from typing import Any

import torch

from landmark.documents import Document, beside_memory, placed
from landmark.models.huggingface import LandmarkCache
from landmark.reading.answer import Delta
from landmark.reading.answering import Answering
from landmark.reading.serving.memories import Memories, Missing, ServerSettings
from landmark.reading.serving.requests import Asked, Chat, Completion
from landmark.reading.serving.responses import Response
from landmark.reading.sources import NULL, Found, check_sources, find
from landmark.reading.support import support
from landmark.utils.errors import UserError

LOG = logging.getLogger(__name__)
SILENCE = 5.0  # seconds without a sign of life, in a stream and in the log


class Progress:
    """How far a text is read; called with tokens read, and in all. The log is told now and then. gone: set where nobody
    waits any more, as the client has left.
    """

    def __init__(self, what: str, gone: threading.Event):
        self.gone, self.read, self.tokens = gone, 0, 0
        self._what, self._told = what, time.monotonic()

    def __call__(self, read: int, tokens: int) -> None:
        self.read, self.tokens = read, tokens
        if time.monotonic() - self._told > SILENCE:
            self._told = time.monotonic()
            LOG.info("%s: %s of %s tokens read", self._what, f"{read:,}", f"{tokens:,}")


class Service:
    """A model, the documents of its clients, and answers about them. name: with which the server was started."""

    def __init__(self, model: Any, tokenizer: Any, settings: ServerSettings, name: str):
        self.settings, self.names = settings, (PurePath(name).name or name, name)
        self.answering = Answering(model, tokenizer, settings.reuse)
        self.memories = Memories(settings, model)
        self.stopped, self._requests = False, weakref.WeakSet[threading.Event]()
        self._recommended = model.generation_config if settings.defaults == "model" else None

    @property
    def finds_sources(self) -> bool:
        """Whether a request may ask for `sources`."""
        with suppress(UserError):
            check_sources(self.answering.model)
            return True
        return False

    def progress(self, what: str) -> Progress:
        """For a request. what: the text, in the log."""
        gone = threading.Event()
        if self.stopped:
            gone.set()
        self._requests.add(gone)
        return Progress(what, gone)

    def stop(self) -> None:
        """End what is read and answered."""
        self.stopped = True
        for gone in list(self._requests):
            gone.set()

    def check_model(self, asked: str | None) -> None:
        """Raise Missing for the name of another model."""
        if asked and asked not in self.names:
            raise Missing(f"there is no model {asked}: this server has {self.names[0]}")

    def complete(self, asked: Asked, client: str, progress: Progress) -> Response:
        """The response to a request. Nothing is read yet, but whatever can be refused is."""
        self.check_model(asked.model)
        prefixes, is_chat = self.answering.prefixes, isinstance(asked, Chat)
        names, parts = asked.named, [self.memories.ids(client, name) for name in asked.named]
        apart, count = asked.documents_read == "apart" and len(names) > 1, len(self.answering.chats.beginning)
        parts[1:] = [part if apart else part[count:] for part in parts[1:]]
        document, starts = [*chain(*parts)], tuple(accumulate(map(len, parts[:-1]), initial=0))
        owner = f"{client}\n{starts}" if apart else client  # what is kept was read in this way too
        prompt, sampling = self._prompt(asked, not document), asked.sampling(self._recommended)
        ids = [*document, *prompt]
        stop = [each for each in ([asked.stop] if isinstance(asked.stop, str) else asked.stop) if each]
        answer, counts = self.answering.new_answer(ids, is_chat, stop), list[int]()
        answer.nats = [] if asked.from_sources else None
        found = list[dict[str, Any]]() if asked.finds else None
        read, null = list[tuple[int, Document]](), list[int]()
        if asked.finds:
            check_sources(self.answering.model)
            for name, (at, text) in zip(names, placed(self.answering.chats.decode, document, starts), strict=True):
                read += [(at + begin, each) for begin, each in self.memories.document(client, name, text).parts()]
            null = self._prompt(asked.with_question(NULL), begins=False)

        def behind(cache: Any) -> Found:
            if found is None:
                return Found([])
            given = read, document, prompt, null, asked.sources, asked.from_sources
            passages = find(self.answering, cache, *given, progress.gone)
            found.extend(each._asdict() for each in passages.sources)
            return passages

        def answered(ids: list[int], cache: Any) -> Generator[Delta]:
            counts.extend((len(ids), cache.get_seq_length()))
            most = min(asked.most or self.settings.tokens, self.settings.tokens)
            yield from self.answering.answer(ids, cache, answer, sampling, most, progress.gone, progress)

        def deltas() -> Generator[Delta]:
            if names and not apart and not any(prefixes.has(each, client) for each in (document, parts[0])):
                prefixes.add(self.memories.memory(client, names[0]), client)
            with prefixes.using(ids, owner) as cache:
                if apart and cache.starts != starts:
                    self._join(cache, client, names, document)
                if not asked.from_sources:
                    yield from answered(ids, cache)
                    behind(cache)
                    return
                if rest := document[cache.get_seq_length() :]:
                    self.answering.read(torch.tensor([rest]), cache, progress.gone, progress)
                passages = behind(cache)
            about = (ids, owner)
            if passages.text:
                about = ([*self.answering.chats.text_ids(passages.text), *prompt], client)
            with prefixes.using(*about) as cache:
                yield from answered(about[0], cache)
            measured = support(self.answering, passages, self._prompt(asked, begins=True), answer, progress.gone)
            response.support = None if measured is None else measured._asdict()

        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        head = {"id": id, "created": int(time.time()), "model": self.names[0]}
        head |= {"documents_read": asked.documents_read} if len(names) > 1 else {}
        head |= self.warnings(client, *names)
        response = Response(deltas(), answer, counts, head, is_chat, found)
        return response

    def _join(self, cache: LandmarkCache, client: str, names: list[str], ids: list[int]) -> None:
        """Let an empty memory have read documents, each alone. Raises UserError where they have not these ids any more,
        and as `LandmarkCache.append`; then it is empty again.
        """
        try:
            for name in names:
                cache.append(self.memories.memory(client, name))
            if cache.ids[0].tolist() != ids:
                raise UserError("documents: one of them was replaced meanwhile: ask again")
        except BaseException:
            cache.reset()
            raise
        cache.settle()
        cache.add_mark()

    def _prompt(self, asked: Asked, begins: bool) -> list[int]:
        """The ids of the prompt. begins: no document comes before it."""
        if isinstance(asked, Completion):
            return self.answering.ids(asked.prompt, begins)
        assert isinstance(asked, Chat)
        messages, goes_on = [message.as_dict() for message in asked.messages], asked.continue_final_message
        return self.answering.chats.ids(messages, begins, goes_on, asked.chat_template_kwargs)

    def add_document(self, client: str, name: str, document: Document, progress: Progress) -> dict[str, Any]:
        """Read a text and keep it under a name. Raises UserError for a text without ids or too large, and Gone."""
        ids = self.answering.checked(self.answering.chats.text_ids(document.text))
        self.memories.check_room(client, name, self.answering.bytes_of(len(ids)))
        with self.answering.prefixes.using(ids, client) as cache:
            rest = torch.tensor([ids[cache.get_seq_length() :]])
            progress(0, rest.shape[1])
            self.answering.read(rest, cache, progress.gone, progress)
            document = document.as_read(self.answering.chats.decode(ids))
            self.memories.save(client, name, cache, beside_memory(document, None))
        return {"id": name, "object": "document", "tokens": len(ids), **_warnings(document.lacks)}

    def warnings(self, client: str, *names: str) -> dict[str, list[str]]:
        """What the files of documents did not give, for a response. Raises Missing and Failed."""
        return _warnings([line for name in names for line in self.memories.lacks(client, name)])

    def document_text(self, client: str, name: str) -> str:
        """The text that a document was read from. Raises Missing and Failed."""
        return self.memories.document(client, name, self.answering.chats.decode(self.memories.ids(client, name))).text


def _warnings(lacks: Sequence[str]) -> dict[str, list[str]]:
    return {"warnings": [*lacks]} if lacks else {}
