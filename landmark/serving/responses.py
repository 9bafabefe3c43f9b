"""What a server answers: completions, whole and as events, and errors, in OpenAI's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from landmark.serving.answering import PART, Answer, Piece, Token
from landmark.utils.errors import UserError

LOG = logging.getLogger(__name__)


@dataclass
class Response:
    """The response to a request, whole or as server-sent events. answers, counts: are filled while `pieces` are read,
    counts with the tokens of each prompt, all and known. head: what it has besides. with_logprobs: whether
    probabilities are given.
    """

    pieces: Iterator[Piece]
    answers: list[Answer]
    counts: list[tuple[int, int]]
    head: dict[str, Any]
    is_chat: bool
    with_logprobs: bool

    def whole(self) -> dict[str, Any]:
        """All answers."""
        tokens = [[] for _ in self.answers]
        for piece in self.pieces:
            tokens[piece.index] += piece.tokens
        choices = []
        for number, answer in enumerate(self.answers):
            message = {**_message(answer.said.text, answer.said.reasoning), "refusal": None}
            said = {"message": message} if self.is_chat else {"text": answer.said.text}
            choices.append(self._choice(number, answer.finish, tokens[number]) | said)
        name = "chat.completion" if self.is_chat else "text_completion"
        return {**self.head, "object": name, "choices": choices, "usage": self.usage()}

    def events(self, with_usage: bool) -> Generator[str]:
        """The events of streamed answers, errors too. with_usage: the last event has counts, the others null."""
        name = "chat.completion.chunk" if self.is_chat else "text_completion"
        head = {**self.head, "object": name, **({"usage": None} if with_usage else {})}
        try:
            for piece in self.pieces:
                # A piece without text gives the server a moment to see whether the client is still there.
                choices = []
                if piece.text or piece.reasoning or piece.tokens:
                    said = {"delta": _message(piece.text, piece.reasoning)} if self.is_chat else {"text": piece.text}
                    choices.append(self._choice(piece.index, None, piece.tokens) | said)
                if piece.finish:
                    said = {"delta": {}} if self.is_chat else {"text": ""}
                    choices.append(self._choice(piece.index, piece.finish, None) | said)
                yield "".join(_data({**head, "choices": [choice]}) for choice in choices)
            if with_usage:
                yield _data({**head, "choices": [], "usage": self.usage()})
        except UserError as refused:
            yield _data(error(str(refused), "server_error"))
        except Exception:
            LOG.exception("a streamed answer failed")
            yield _data(error("the server failed", "server_error"))
        yield "data: [DONE]\n\n"

    def _choice(self, index: int, finish: str | None, tokens: list[Token] | None) -> dict[str, Any]:
        """tokens: with their probabilities; None: there are none, at the end of a stream."""
        of = _of_chat if self.is_chat else _of_text
        logprobs = of(tokens) if self.with_logprobs and tokens is not None else None
        return {"index": index, "finish_reason": finish, "logprobs": logprobs}

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


def _message(text: str, reasoning: str) -> dict[str, Any]:
    """A message, or more of it; as in other servers, reasoning has a field of its own."""
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}


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
