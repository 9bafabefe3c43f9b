"""Ids of chats: what a model reads of new messages, after a text that has begun or not."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from landmark.utils.errors import UserError

Messages = Sequence[dict[str, str]]


class Chats:
    """Turns messages into ids by the tokenizer's template for chats, or without one into lines of role and content.

    The names of special tokens are tokens where the template writes them, and ordinary text in a message.
    """

    def __init__(self, tokenizer: Any):
        """tokenizer: of transformers."""
        self.tokenizer = tokenizer
        names = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def ids(self, messages: Messages, before: Messages = (), last: int | None = None) -> list[int]:
        """Ids of new messages and of the beginning of the answer.

        1. With earlier messages, of which the last is an answer: what the template writes behind that answer.
        2. Without, where a text was read: all that it writes, but the token that begins a text.
        3. Where nothing was read: all that it writes.

        Args:
            messages: the new ones.
            before: the earlier ones.
            last: id that was read last, which may have ended the answer already. None: a new text.

        Raises UserError for messages that the template refuses, and for a template that leaves answers out.
        """
        protected = _Protected(self._special)
        new = [protected.message(message) for message in messages]
        if before and last is not None:
            end = self.tokenizer.convert_ids_to_tokens(last)
            text = self._after_answer([protected.message(message) for message in before], new)
            if text.startswith(end) and self._special.fullmatch(end):
                return protected.ids(self.tokenizer, text)[1:]  # read already; it is there for what follows it
            return protected.ids(self.tokenizer, text)
        text = self._render(new)
        begin = self.tokenizer.bos_token
        if last is not None and begin and text.startswith(begin) and not self._opens(begin, new):
            text = text.removeprefix(begin)
        return protected.ids(self.tokenizer, text)

    def _render(self, messages: Messages) -> str:
        """The text of messages, up to the beginning of the answer."""
        if not self.tokenizer.chat_template:
            return "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant:"
        try:
            return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise UserError(f"messages: the model's template refuses them ({error})") from error

    def _after_answer(self, before: Messages, new: Messages) -> str:
        """What the template writes behind the last answer, of which it knows a stand-in: it may change the answer."""
        stand_in = f"answer{uuid.uuid4().hex}"
        text = self._render([*before[:-1], {**before[-1], "content": stand_in}, *new])
        if stand_in not in text:
            raise UserError("messages: the model's template leaves earlier answers out, so its chats have no session")
        return text.rpartition(stand_in)[2]

    def _opens(self, begin: str, messages: Messages) -> bool:
        """Whether the template begins each message with this token, and not only the text."""
        try:
            return begin in self._after_answer([*messages, {"role": "assistant", "content": ""}], messages[-1:])
        except UserError:
            return False


class _Protected:
    """The names of special tokens in messages, replaced while a template writes the messages."""

    def __init__(self, special: re.Pattern[str]):
        self._special, self._stand_ins = special, dict[str, str]()

    def message(self, message: dict[str, str]) -> dict[str, str]:
        """The message without special tokens' names."""
        return {**message, "content": self._special.sub(self._replace, message["content"])}

    def _replace(self, found: re.Match[str]) -> str:
        stand_in = f"token{uuid.uuid4().hex}"
        self._stand_ins[stand_in] = found[0]
        return stand_in

    def ids(self, tokenizer: Any, text: str) -> list[int]:
        """Ids of a text with the template's special tokens, and the messages' names of such tokens as text."""
        if not tokenizer.chat_template:  # nothing in it is a template's
            return tokenizer(self._restored(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if not self._stand_ins:
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, at = [], 0
        for found in [*self._special.finditer(text), None]:
            part = self._restored(text[at : found.start() if found else None])
            if part:
                ids += tokenizer(part, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if found:
                ids.append(tokenizer.convert_tokens_to_ids(found[0]))
                at = found.end()
        return ids

    def _restored(self, text: str) -> str:
        for stand_in, name in self._stand_ins.items():
            text = text.replace(stand_in, name)
        return text
