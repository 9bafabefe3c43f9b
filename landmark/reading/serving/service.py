"""What the server's routes do: answers, documents, and how far a text is read."""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain
from pathlib import PurePath
from typing import Any, BinaryIO

import torch

from landmark.documents import Document, beside_memory, document_of, placed
from landmark.models.huggingface import LandmarkCache, joined
from landmark.models.huggingface.prefixes import Saved
from landmark.reading.answer import Delta
from landmark.reading.answering import Answering, finished
from landmark.reading.answering import Progress as Read
from landmark.reading.serving.memories import Memories, Missing, ServerSettings
from landmark.reading.serving.progress import Progress
from landmark.reading.serving.readings import Readings
from landmark.reading.serving.requests import Asked
from landmark.reading.serving.responses import Response
from landmark.reading.session import Began, Passages, Prompt, Session
from landmark.reading.sources import check_sources
from landmark.reading.support import Support
from landmark.utils.errors import UserError

ON_CPU = 512  # tokens of a piece of a document: larger ones are read no faster, and who asks waits for one


class Service:
    """A model, the documents of its clients, and answers about them. name: with which the server was started."""

    def __init__(self, model: Any, tokenizer: Any, settings: ServerSettings, name: str):
        self.settings, self.names = settings, (PurePath(name).name or name, name)
        self.answering = Answering(model, tokenizer, settings.reuse)
        self.memories, self.readings = Memories(settings, model), Readings(settings.requests)
        self._opening = threading.Lock()
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

    def close(self) -> None:
        """`stop`, and give the folder of memories free."""
        self.stop()
        self.readings.wait()
        self.memories.close()

    def check_model(self, asked: str | None) -> None:
        """Raise Missing for the name of another model."""
        if asked and asked not in self.names:
            raise Missing(f"there is no model {asked}: this server has {self.names[0]}")

    def complete(self, asked: Asked, client: str, progress: Progress) -> Response:
        """The response to a request. Nothing is read yet, but whatever can be refused is."""
        self.check_model(asked.model)
        prompt, sampling = asked.prompt_of(), asked.sampling(self._recommended)
        warnings = [*asked.warnings, *(self._unseen(prompt) if prompt.is_chat else ())]
        session = self._session(client, asked.named, asked.documents_read == "apart")
        if asked.finds:
            check_sources(self.answering.model)
        stop = [each for each in ([asked.stop] if isinstance(asked.stop, str) else asked.stop) if each]
        exchange, most = session.exchange(prompt, stop), min(asked.most or self.settings.tokens, self.settings.tokens)
        counts, found = list[int](), list[dict[str, Any]]() if asked.finds else None

        def deltas() -> Generator[Delta]:
            for event in session.ask(exchange, sampling, most, asked.sources, asked.from_sources, progress.gone):
                if isinstance(event, Delta):
                    yield event
                elif isinstance(event, Began):
                    counts.extend(event)
                elif isinstance(event, Passages) and found is not None:
                    found.extend(each._asdict() for each in event.found)
                elif isinstance(event, Support):
                    response.support = event._asdict()
                elif isinstance(event, Read):
                    progress(*event)

        id = f"{'chatcmpl' if prompt.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        head = {"id": id, "created": int(time.time()), "model": self.names[0]}
        head |= {"documents_read": asked.documents_read} if len(asked.named) > 1 else {}
        head |= _warnings([*warnings, *self._lacks(client, *asked.named)])
        response = Response(deltas(), exchange.answer, counts, head, prompt.is_chat, found)
        return response

    def _unseen(self, prompt: Prompt) -> list[str]:
        """Warnings of fields of messages that the model does not see. Raises UserError for a text that it does not."""
        unseen = self.answering.chats.unseen(prompt.messages or (), prompt.goes_on, prompt.settings)
        if lost := [number for number, name in unseen if name == "content"]:
            role = (prompt.messages or ())[lost[0]]["role"]
            raise UserError(f"messages.{lost[0]}.content: the model's template leaves out what the role {role} says")
        return [f"messages.{number}.{name}: the model's template leaves it out" for number, name in unseen]

    def _session(self, client: str, names: list[str], apart: bool) -> Session:
        """A session that has read these documents of a client. Raises as `Memories.ids`."""
        parts = [self.memories.ids(client, name) for name in names]
        if not parts:
            return Session(self.answering, client)
        apart, count = apart and len(names) > 1, len(self.answering.chats.beginning)
        parts[1:] = [part if apart else part[count:] for part in parts[1:]]
        ids, ends = [*chain(*parts)], tuple(accumulate(map(len, parts)))
        load = partial(self._load, client, names, apart)

        def documents() -> list[tuple[int, Document]]:
            texts, found = placed(self.answering.chats.decode, ids, (0, *ends[:-1])), list[tuple[int, Document]]()
            for name, (at, text) in zip(names, texts, strict=True):
                found += [(at + begin, each) for begin, each in self.memories.document(client, name, text).parts()]
            return found

        saved = Saved(len(ids), ends, load) if apart else Saved(ends[0], (), load)
        return Session(self.answering, client, ids, documents, saved=saved)

    def _load(self, client: str, names: list[str], apart: bool) -> LandmarkCache:
        """The memory of the first document, or of all, each read alone. Raises UserError as `Memories.memory` and
        `joined`.
        """
        if not apart:
            return self.memories.memory(client, names[0])
        return joined(self.memories.memory(client, name) for name in names)

    def document_in(self, file: BinaryIO, name: str, encoding: str | None = None) -> Document:
        """`document_of` a file, of which one at a time lies in memory."""
        with self._opening:
            file.seek(0)
            return document_of(file.read(), name, encoding)

    def add_document(self, client: str, name: str, document: Document, progress: Progress) -> dict[str, Any]:
        """Read a text and keep it under a name. Raises UserError for a text without ids or too large, and Gone."""
        ids = self.answering.checked(self.answering.chats.text_ids(document.text))
        self.memories.check_room(client, name, self.answering.bytes_of(len(ids)))
        with self.answering.prefixes.using(ids, client) as cache:
            rest = torch.tensor([ids[cache.get_seq_length() :]])
            progress(0, rest.shape[1])
            largest = ON_CPU if self.answering.model.device.type == "cpu" else None
            reading = self.answering.read(rest, cache, progress.gone, False, progress, largest)
            finished(reading, progress)
            document = document.as_read(self.answering.chats.decode(ids))
            self.memories.save(client, name, cache, beside_memory(document, None))
        return {"id": name, "object": "document", "tokens": len(ids), **_warnings(document.lacks)}

    def warnings(self, client: str, *names: str) -> dict[str, list[str]]:
        """What the files of documents did not give, for a response. Raises Missing and Failed."""
        return _warnings(self._lacks(client, *names))

    def _lacks(self, client: str, *names: str) -> list[str]:
        return [line for name in names for line in self.memories.lacks(client, name)]

    def document_text(self, client: str, name: str) -> str:
        """The text that a document was read from. Raises Missing and Failed."""
        return self.memories.document(client, name, self.answering.chats.decode(self.memories.ids(client, name))).text


def _warnings(lacks: Sequence[str]) -> dict[str, list[str]]:
    return {"warnings": [*lacks]} if lacks else {}
