"""What a server answers: completions, whole and as events, and errors, in OpenAI's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from landmark.reading.answer import Answer, Delta
from landmark.reading.answering import Gone
from landmark.utils.errors import UserError

STOPS = "the server stops"
LOG = logging.getLogger(__name__)


@dataclass
class Response:
    """The response to a request, whole or as server-sent events. answer, counts, sources: are filled while `deltas` are
    read, counts with the tokens of the prompt, all and known; sources is None where none are wanted. support: of an
    answer made from them alone, as of `landmark.reading.support`. head: what it has besides.
    """

    deltas: Generator[Delta]
    answer: Answer
    counts: list[int]
    head: dict[str, Any]
    is_chat: bool
    sources: list[dict[str, Any]] | None = None
    support: dict[str, Any] | None = None

    def whole(self) -> dict[str, Any]:
        """The answer."""
        for _ in self.deltas:
            pass
        whole = self.answer
        message = {**_message(whole.text, whole.reasoning), "refusal": None}
        choice = _choice(self.answer.finish) | ({"message": message} if self.is_chat else {"text": whole.text})
        choice |= self.beside()
        name = "chat.completion" if self.is_chat else "text_completion"
        return {**self.head, "object": name, "choices": [choice], "usage": self.usage()}

    def events(self, with_usage: bool) -> Generator[str]:
        """The events of a streamed answer, errors too. with_usage: the last event has counts, the others null."""
        name = "chat.completion.chunk" if self.is_chat else "text_completion"
        head = {**self.head, "object": name, **({"usage": None} if with_usage else {})}
        try:
            for delta in self.deltas:
                # A delta without text gives the server a moment to see whether the client is still there.
                choices = []
                if delta.text or delta.reasoning:
                    said = {"delta": _message(delta.text, delta.reasoning)} if self.is_chat else {"text": delta.text}
                    choices.append(_choice(None) | said)
                if delta.finish:
                    said = {"delta": {}} if self.is_chat else {"text": ""}
                    choices.append(_choice(delta.finish) | said)
                yield "".join(_data({**head, "choices": [choice]}) for choice in choices)
            if with_usage:
                yield _data({**head, "choices": [], "usage": self.usage()})
            if self.sources is not None:
                said = {"delta": {}} if self.is_chat else {"text": ""}
                yield _data({**head, "choices": [_choice(None) | said | self.beside()]})
        except Exception as raised:
            yield _failed(raised)
        yield "data: [DONE]\n\n"

    def beside(self) -> dict[str, Any]:
        """The passages and the support of an answer."""
        found = {"sources": self.sources, "support": self.support}
        return {name: each for name, each in found.items() if each is not None}

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens; `cached_tokens` of the prompt were read before."""
        (prompt, cached), said = self.counts, len(self.answer.tokens)
        counted = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
        return {**counted, "prompt_tokens_details": {"cached_tokens": cached}}


def events_of(work: Callable[[], dict[str, Any]]) -> Generator[str]:
    """The event of a result, or of an error."""
    try:
        yield _data(work())
    except Exception as raised:
        yield _failed(raised)
    yield "data: [DONE]\n\n"


def _failed(raised: Exception) -> str:
    """The event of an error."""
    return _data(error_of(raised))


def error_of(raised: Exception) -> dict[str, Any]:
    """What a client is told of an error in a stream; the log has the rest."""
    if isinstance(raised, Gone):
        return error(STOPS, "server_error")
    if not isinstance(raised, UserError):
        LOG.error("a stream failed", exc_info=raised)
    return error(str(raised) if isinstance(raised, UserError) else "the server failed", "server_error")


def progress(read: int, tokens: int, is_document: bool) -> str:
    """A sign of life of a stream: a comment, or of a document an event."""
    if is_document:
        return _data({"object": "document.progress", "read": read, "tokens": tokens})
    return f": {read} of {tokens} tokens read\n\n" if tokens else ": waiting\n\n"


def _choice(finish: str | None) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish, "logprobs": None}


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form. message: one line; what of it is no text is replaced."""
    one_line = " ".join(message.encode(errors="replace").decode().split())
    return {"error": {"message": one_line, "type": kind, "param": None, "code": code}}


def _message(text: str, reasoning: str) -> dict[str, Any]:
    """A message, or more of it; as in other servers, reasoning has a field of its own."""
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}
