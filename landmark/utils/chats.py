"""Texts and chats as ids: what the tokenizer puts before a text, what its template makes of messages, and reasoning."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from landmark.utils.errors import UserError

Messages = Sequence[Mapping[str, Any]]
OPEN, CLOSE = "<think>", "</think>"  # around the reasoning of an answer, where the template has them


class Chats:
    """Turns texts and messages into ids, as the tokenizer and its template for chats do. Names of special tokens are
    tokens only where the template writes them. Without a template a message becomes a line of its role and its content.
    """

    def __init__(self, tokenizer: Any):
        """tokenizer: of transformers."""
        self.tokenizer = tokenizer
        names = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
        ids, bare = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
        self.beginning: list[int] = ids[: ids.index(bare[0])] if bare else []  # ids before a text, as the model expects
        self.reasons = CLOSE in (tokenizer.chat_template or "")

    def text_ids(self, text: str, begins: bool = True) -> list[int]:
        """Ids of a text in which the names of special tokens are ordinary text. begins: nothing was read before."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*self.beginning, *ids] if begins else ids

    def ids(self, messages: Messages, begins: bool = True, **settings: Any) -> list[int]:
        """Ids of messages up to the beginning of the answer. begins: nothing was read before. settings: of the
        template, as `enable_thinking`. Raises UserError for messages that the template refuses.
        """
        stand_ins: dict[str, str] = {}

        def replace(found: re.Match[str]) -> str:
            stand_ins[name := f"token{uuid.uuid4().hex}"] = found[0]
            return name

        protected = [{**each, "content": self._special.sub(replace, each["content"])} for each in messages]
        if not self.tokenizer.chat_template:
            gaps = ["" if each["content"][:1].isspace() else " " for each in protected]  # an answer has its own
            lines = [f"{each['role']}:{gap}{each['content']}\n" for each, gap in zip(protected, gaps, strict=True)]
            return self.text_ids(_restored("".join([*lines, "assistant:"]), stand_ins), begins)
        try:
            text = self.tokenizer.apply_chat_template(protected, add_generation_prompt=True, tokenize=False, **settings)
        except (TemplateError, TypeError) as error:
            raise UserError(f"messages: the model's template refuses them ({error})") from error
        ids = self._ids_of_template(text, stand_ins)
        count = len(self.beginning)
        return ids[count:] if not begins and count and ids[:count] == self.beginning else ids

    def _ids_of_template(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        if not stand_ins:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, at = [], 0
        for found in [*self._special.finditer(text), None]:
            part = _restored(text[at : found.start() if found else None], stand_ins)
            ids += self.text_ids(part, False) if part else []
            if found:
                ids.append(self.tokenizer.convert_tokens_to_ids(found[0]))
                at = found.end()
        return ids

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of reasoning, which the template has written."""
        return self.reasons and self.tokenizer.decode(ids[-8:]).rstrip().endswith(OPEN)

    def parts(self, text: str, opened: bool, whole: bool = True) -> tuple[str, str]:
        """The reasoning in an answer, and what follows it. opened: the prompt has begun it. whole: the answer has
        ended; before, what may be a part of a mark is left out.
        """
        begun = text.lstrip()
        if not self.reasons or (not opened and not begun.startswith(OPEN)):
            is_open = self.reasons and not whole and OPEN.startswith(begun)
            return "", "" if is_open else text
        reasoning, closed, answer = (text if opened else begun).removeprefix(OPEN).partition(CLOSE)
        if not closed and not whole:
            reasoning = reasoning[: max(0, len(reasoning) - len(CLOSE) + 1)]
        return reasoning.strip(), answer.lstrip()


class Separation:
    """The reasoning of an answer that comes piece by piece, and the text that follows it, so far. chats, opened: as of
    `Chats.parts`; None: reasoning stays in the text.
    """

    def __init__(self, chats: Chats | None = None, opened: bool = False):
        self._chats, self._opened = chats, opened
        self.reasoning = self.text = ""

    def more(self, answer: str, whole: bool = False) -> tuple[str, str]:
        """What is new of both. answer: all of it so far. whole: it has ended."""
        before = len(self.reasoning), len(self.text)
        parts = ("", answer) if self._chats is None else self._chats.parts(answer, self._opened, whole)
        self.reasoning, self.text = parts
        return self.reasoning[before[0] :], self.text[before[1] :]


def _restored(text: str, stand_ins: Mapping[str, str]) -> str:
    for stand_in, name in stand_ins.items():
        text = text.replace(stand_in, name)
    return text
