"""What a server answers: completions, whole and as events, and errors, in OpenAI's form."""

from __future__ import annotations

import itertools
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
    """How one kind of completion writes its text, whole and in parts (None: the end), and its tokens' probabilities."""

    object: str
    chunk: str
    whole: Callable[[str], Any]
    part: Callable[[str | None], Any]
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


TEXT = Shape(
    "text_completion",
    "text_completion",
    lambda text: {"text": text},
    lambda text: {"text": text or ""},
    _of_text,
)
CHAT = Shape(
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {} if text is None else {"role": "assistant", "content": text}},
    _of_chat,
)


def whole(
    first: Piece,
    pieces: Iterator[Piece],
    answers: list[Answer],
    counts: list[int],
    head: dict[str, Any],
    shape: Shape,
    with_logprobs: bool,
) -> dict[str, Any]:
    """The response with all answers.

    Args:
        first: piece of the answers.
        pieces: those after it.
        answers: are filled by `pieces`.
        counts: tokens of each prompt; is filled by `pieces`.
        head: what the response has besides.
        shape: of the completion.
        with_logprobs: whether the tokens' probabilities are given.
    """
    texts, tokens = ["" for _ in answers], [[] for _ in answers]
    for piece in itertools.chain([first], pieces):
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.tokens
    choices = [
        {
            "index": number,
            "finish_reason": answer.finish,
            "logprobs": shape.logprobs(tokens[number]) if with_logprobs else None,
            **shape.whole(texts[number]),
        }
        for number, answer in enumerate(answers)
    ]
    return {**head, "object": shape.object, "choices": choices, "usage": usage(counts, answers)}


def events(
    first: Piece,
    pieces: Iterator[Piece],
    answers: list[Answer],
    counts: list[int],
    head: dict[str, Any],
    shape: Shape,
    with_logprobs: bool,
    with_usage: bool,
) -> Generator[str]:
    """The server-sent events of streamed answers; an error becomes an event too.

    Args:
        first: piece of the answers.
        pieces: those after it.
        answers: are filled by `pieces`.
        counts: tokens of each prompt; is filled by `pieces`.
        head: what all events have.
        shape: of the completion.
        with_logprobs: whether the tokens' probabilities are given.
        with_usage: whether a last event, without text, has the numbers of tokens; all others then have none, null.
    """
    no_usage = {"usage": None} if with_usage else {}

    def data(content: dict[str, Any]) -> str:
        return f"data: {json.dumps(content)}\n\n"

    def event(piece: Piece, text: str | None, finish: str | None = None) -> str:
        logprobs = shape.logprobs(piece.tokens) if with_logprobs and finish is None else None
        choice = {"index": piece.index, "finish_reason": finish, "logprobs": logprobs, **shape.part(text)}
        return data({**head, "object": shape.chunk, "choices": [choice], **no_usage})

    try:
        for piece in itertools.chain([first], pieces):
            # A piece without text gives the server a moment to see whether the client is still there.
            said = event(piece, piece.text) if piece.text or piece.tokens else ""
            yield said + (event(piece, None, piece.finish) if piece.finish else "")
        if with_usage:
            yield data({**head, "object": shape.chunk, "choices": [], "usage": usage(counts, answers)})
    except UserError as refused:
        yield data(error(str(refused), "server_error"))
    except Exception:
        LOG.exception("a streamed answer failed")
        yield data(error("the server failed", "server_error"))
    yield "data: [DONE]\n\n"


def usage(counts: list[int], answers: list[Answer]) -> dict[str, int]:
    """The numbers of tokens of a request. counts: tokens of each prompt."""
    prompt_tokens, said = sum(counts), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": said, "total_tokens": prompt_tokens + said}


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form. message: one line; what of it is no text is replaced."""
    one_line = " ".join(message.encode(errors="replace").decode().split())
    return {"error": {"message": one_line, "type": kind, "param": None, "code": code}}
