"""OpenAI's newer protocol, /v1/responses: its requests are chats, and its answers those of chats in another form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator
from typing import Any

from pydantic import Field, model_validator

from landmark.reading.answer import Delta
from landmark.reading.serving.requests import Chat, Message, check_supported
from landmark.reading.serving.responses import Response, error_of

# Fields that would change an answer, and are not supported, with the values that have no effect, as of `REFUSED`.
REFUSED_TOO = {
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ()),
    "background": (False,),
    "text": tuple({**a, **b} for a in ({}, {"format": {"type": "text"}}) for b in ({}, {"verbosity": "medium"})),
    "truncation": ("disabled",),
}
EFFECTLESS = "id", "type", "status", "phase"  # of a message in the input


class Asking(Chat):
    """The body of /v1/responses. input: a text of the user, or messages, among which reasoning is left out.
    instructions: a message of the system before them. Nothing is stored: the input has the whole conversation.
    """

    messages: list[Message] = Field(alias="input", min_length=1)
    max_tokens: int | None = Field(None, alias="max_output_tokens")

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        check_supported(given, REFUSED_TOO)
        given = {name: value for name, value in given.items() if name not in REFUSED_TOO}
        if "max_tokens" in given:
            given.setdefault("max_output_tokens", given.pop("max_tokens"))
        items, instructions = given.get("input"), given.pop("instructions", None)
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if isinstance(items, list):
            system = [] if instructions in (None, "") else [{"role": "system", "content": instructions}]
            given["input"] = [_message_of(each) for each in [*system, *items] if not _is_reasoning(each)]
        return given

    @classmethod
    def known(cls) -> set[str]:
        return super().known() | REFUSED_TOO.keys() | {"instructions", "max_tokens"}


def _is_reasoning(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _message_of(item: Any) -> Any:
    """A message without the fields of an answer that is sent back; what is no message stays, and is refused."""
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        return item
    return {name: value for name, value in item.items() if name not in EFFECTLESS}


class Responded:
    """The response to such a request. It has the methods of `Response`, whose answer it gives in another form."""

    def __init__(self, response: Response, asked: Asking):
        self._response, self.deltas, self._numbers = response, response.deltas, itertools.count()
        self._reasoning = 0  # tokens
        self._id = response.head["id"].partition("-")[2]
        self._head = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": response.head["created"],
            "model": response.head["model"],
            "error": None,
            "instructions": None,
            "max_output_tokens": asked.most,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
            **{name: response.head[name] for name in ("warnings",) if name in response.head},
        }

    def whole(self) -> dict[str, Any]:
        """The answer. status: `incomplete` where it has as many tokens as were allowed."""
        for _ in self._counted():
            pass
        return self._done()

    def _counted(self) -> Generator[Delta]:
        answer = self._response.answer
        for delta in self.deltas:
            if answer.reasoning and not answer.text:
                self._reasoning = len(answer.tokens)
            yield delta

    def events(self, with_usage: bool) -> Generator[str]:
        """The events of a streamed answer, errors too: one item for the reasoning, if there is some, and one for the
        text. Reasoning that comes after the text has begun is in the last event alone. with_usage: it is always there.
        """
        begun, current = {**self._head, "status": "in_progress", "incomplete_details": None, "output": []}, ""
        yield self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        try:
            count = 0
            for delta in self._counted():
                events = ""
                for kind, text in (("reasoning", delta.reasoning), ("output", delta.text)):
                    if text and current != kind and (kind, current) != ("reasoning", "output"):
                        events += self._end(current, count) + self._begin(kind, count := count + 1)
                        current = kind
                    if text and current == kind:
                        events += self._part_event(kind, "text.delta", count, delta=text)
                yield events  # without text, a moment to see whether the client is still there
            if current != "output":
                yield self._end(current, count) + self._begin("output", count := count + 1)
            yield self._end("output", count)
            done = self._done()
            yield self._event(f"response.{done['status']}", response=done)
        except Exception as raised:
            said = error_of(raised)["error"]
            yield self._event("error", code=said["code"] or said["type"], message=said["message"], param=None)

    def _event(self, kind: str, **content: Any) -> str:
        data = {"type": kind, "sequence_number": next(self._numbers), **content}
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

    def _part_event(self, kind: str, what: str, count: int, **content: Any) -> str:
        """An event of the only part of the item with the number `count`, which begins at 1."""
        place = {"item_id": self._item(kind)["id"], "output_index": count - 1, "content_index": 0}
        logprobs = {"logprobs": []} if kind == "output" and what.startswith("text") else {}
        what = what if what.startswith("content") else f"{kind}_{what}"
        return self._event(f"response.{what}", **place, **logprobs, **content)

    def _begin(self, kind: str, count: int) -> str:
        item = {**self._item(kind), "status": "in_progress", "content": []}
        part = {**self._item(kind)["content"][0], "text": ""}
        begun = self._event("response.output_item.added", output_index=count - 1, item=item)
        return begun + self._part_event(kind, "content_part.added", count, part=part)

    def _end(self, kind: str, count: int) -> str:
        if not kind:
            return ""
        item = self._item(kind)
        (part,) = item["content"]
        ended = self._part_event(kind, "text.done", count, text=part["text"])
        ended += self._part_event(kind, "content_part.done", count, part=part)
        return ended + self._event("response.output_item.done", output_index=count - 1, item=item)

    @property
    def _status(self) -> str:
        return "incomplete" if self._response.answer.finish == "length" else "completed"

    def _item(self, kind: str) -> dict[str, Any]:
        answer = self._response.answer
        if kind == "reasoning":
            part = {"type": "reasoning_text", "text": answer.reasoning}
            return {
                "id": f"rs_{self._id}",
                "type": "reasoning",
                "status": "completed",
                "summary": [],
                "content": [part],
            }
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        item = {"id": f"msg_{self._id}", "type": "message", "role": "assistant"}
        return {**item, "status": self._status, "content": [part]}

    def _done(self) -> dict[str, Any]:
        usage, status = self._response.usage(), self._status
        kinds = ["reasoning"] * bool(self._response.answer.reasoning) + ["output"]
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(kind) for kind in kinds],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning},
                "total_tokens": usage["total_tokens"],
            },
            **self._response.beside(),
        }
