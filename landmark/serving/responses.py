"""What a server answers: completions, whole and as events, and errors, in OpenAI's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from landmark.serving.answering import PART, Answer, Piece, Token
from landmark.utils.errors import UserError

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """How a kind of completion writes text and reasoning, whole and in parts (None: the end), and probabilities."""

    object: str
    chunk: str
    whole: Callable[[str, str], Any]
    part: Callable[[str | None, str], Any]
    logprobs: Callable[[list[Token]], Any]


def _of_text(tokens: list[Token]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.probable) for token in tokens],
        "text_offset": [token.start for token in tokens],
    }


def _of_chat(tokens: list[Token]) -> dict[str, Any]:
    def scored(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": None if text.startswith(PART) else list(text.encode())}

    content = [
        {**scored(token.text, token.logprob), "top_logprobs": [scored(*each) for each in token.probable]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


_NAME = "text_completion"
TEXT = Shape(_NAME, _NAME, lambda text, _: {"text": text}, lambda text, _: {"text": text or ""}, _of_text)


def _message(text: str | None, reasoning: str) -> dict[str, Any]:
    """A message, or more of it; as in other servers, reasoning has a field of its own."""
    thought = {"reasoning_content": reasoning} if reasoning else {}
    return {} if text is None else {"role": "assistant", "content": text, **thought}


CHAT = Shape(
    "chat.completion",
    "chat.completion.chunk",
    lambda text, reasoning: {"message": {**_message(text, reasoning), "refusal": None}},
    lambda text, reasoning: {"delta": _message(text, reasoning)},
    _of_chat,
)


@dataclass
class Response:
    """The response to a request while its answers are made, whole or as server-sent events.

    answers, counts: are filled while `pieces` are read, counts with the tokens of each prompt, and those of them that
    were read before. head: what it has besides. with_logprobs: whether the tokens' probabilities are given.
    """

    pieces: Iterator[Piece]
    answers: list[Answer]
    counts: list[tuple[int, int]]
    head: dict[str, Any]
    shape: Shape
    with_logprobs: bool

    def whole(self) -> dict[str, Any]:
        """All answers."""
        tokens = [[] for _ in self.answers]
        for piece in self.pieces:
            tokens[piece.index] += piece.tokens
        choices = [
            {
                "index": number,
                "finish_reason": answer.finish,
                "logprobs": self.shape.logprobs(tokens[number]) if self.with_logprobs else None,
                **self.shape.whole(answer.text, answer.reasoning),
            }
            for number, answer in enumerate(self.answers)
        ]
        return {**self.head, "object": self.shape.object, "choices": choices, "usage": self.usage()}

    def events(self, with_usage: bool) -> Generator[str]:
        """The events of streamed answers; an error becomes an event too.

        with_usage: whether a last event, without text, has the numbers of tokens; all others then have none, null.
        """
        no_usage = {"usage": None} if with_usage else {}
        try:
            for piece in self.pieces:
                # A piece without text gives the server a moment to see whether the client is still there.
                has_content = piece.text or piece.reasoning or piece.tokens
                said = self._event(piece, piece.text, no_usage) if has_content else ""
                yield said + (self._event(piece, None, no_usage) if piece.finish else "")
            if with_usage:
                yield _data({**self.head, "object": self.shape.chunk, "choices": [], "usage": self.usage()})
        except UserError as refused:
            yield _data(error(str(refused), "server_error"))
        except Exception:
            LOG.exception("a streamed answer failed")
            yield _data(error("the server failed", "server_error"))
        yield "data: [DONE]\n\n"

    def _event(self, piece: Piece, text: str | None, no_usage: dict[str, None]) -> str:
        """text: None at the end of an answer."""
        logprobs = self.shape.logprobs(piece.tokens) if self.with_logprobs and text is not None else None
        finish = piece.finish if text is None else None
        choice = {"index": piece.index, "finish_reason": finish, "logprobs": logprobs}
        choice |= self.shape.part(text, piece.reasoning)
        return _data({**self.head, "object": self.shape.chunk, "choices": [choice], **no_usage})

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens; `cached_tokens` of the prompts were read before."""
        prompt_tokens, cached = (sum(counts) for counts in zip(*self.counts, strict=True))
        said = sum(len(answer.tokens) for answer in self.answers)
        counted = {"prompt_tokens": prompt_tokens, "completion_tokens": said, "total_tokens": prompt_tokens + said}
        return {**counted, "prompt_tokens_details": {"cached_tokens": cached}}


def _data(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form. message: one line; what of it is no text is replaced."""
    one_line = " ".join(message.encode(errors="replace").decode().split())
    return {"error": {"message": one_line, "type": kind, "param": None, "code": code}}
