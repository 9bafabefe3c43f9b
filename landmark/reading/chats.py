"""Texts and chats as ids: what the tokenizer puts before a text, what its template makes of messages, and reasoning."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from landmark.reading.templates import Template
from landmark.utils.errors import UserError

Messages = Sequence[Mapping[str, Any]]


class Marks(NamedTuple):
    """What stands around the reasoning of an answer. Templates write them, or cut them off, in earlier answers."""

    opening: str
    closing: str


CHANNELS = Marks("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")  # of gpt-oss: messages in channels
REASONING = (
    Marks("<think>", "</think>"),  # Qwen, DeepSeek, GLM, MiniMax, Nemotron and many others
    Marks("[THINK]", "[/THINK]"),  # Mistral
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    Marks("<|channel>thought", "<channel|>"),  # Gemma 4
    Marks("◁think▷", "◁/think▷"),  # Kimi
    CHANNELS,
)


class Chats:
    """Turns texts and messages into ids, as the tokenizer and its template for chats do, and ids of an answer into
    text. Names of special tokens are tokens only where the template writes them. Without a template a message becomes a
    line of its role and its content.
    """

    def __init__(self, tokenizer: Any):
        """tokenizer: of transformers."""
        self.tokenizer, self.template = tokenizer, Template(tokenizer)
        special = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._tokens = {str(token): token for token in tokenizer.added_tokens_decoder.values() if token.special}
        names = sorted(self._tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        ids, bare = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
        self.beginning: list[int] = ids[: ids.index(bare[0])] if bare else []  # ids before a text, as the model expects
        self.marks = next((marks for marks in REASONING if any(mark in self.template.source for mark in marks)), None)
        shown = "".join(self.marks or ()) + ("<|start|><|end|>" if self.marks is CHANNELS else "")
        self._beginning_behind = dict[str, bool]()
        self._special_ids, self._marks_ids = set(special), {id for id, name in special.items() if name in shown}

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end an answer: without a template the model would go on and ask itself."""
        return () if self.template else ("\nuser:",)

    def text_ids(self, text: str, begins: bool = True) -> list[int]:
        """Ids of a text in which the names of special tokens are ordinary text. begins: nothing was read before."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*self.beginning, *ids] if begins else ids

    def ids(
        self,
        messages: Messages,
        begins: bool = True,
        goes_on: bool = False,
        settings: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> list[int]:
        """Ids of messages up to the beginning of the answer. begins: nothing was read before. goes_on: the last message
        is the beginning of the answer. settings: of the template, as `enable_thinking`. now: the time that the template
        may write (None: that of the clock). Raises UserError as `Template.render`.
        """
        words = _Words()
        hide = partial(_changed, lambda text: self._special.sub(words.hide, text))
        protected = [{name: x if name == "role" else hide(x) for name, x in each.items()} for each in messages]
        text = self.text(protected, goes_on, hide({**(settings or {})}), now)
        if not self.template:
            return self.text_ids(words.shown(text), begins)
        ids, count = self._ids_of_template(text, words), len(self.beginning)
        return ids[count:] if not begins and count and ids[:count] == self.beginning else ids

    def unseen(
        self, messages: Messages, goes_on: bool = False, settings: Mapping[str, Any] | None = None
    ) -> list[tuple[int, str]]:
        """The messages' numbers, and the names of their fields, that the template leaves out."""
        marks, values = dict[str, tuple[int, str]](), list[tuple[int, str, Any]]()
        marked = [{**each} for each in messages]
        for number, each in enumerate(messages):
            for name in {"content", "name", "reasoning_content"} & {name for name, x in each.items() if x}:
                mark = f"seen{len(marks)}x{uuid.uuid4().hex}"
                marks[mark], marked[number][name] = (number, name), each[name] + mark
            calls = (call.get("function") for call in each.get("tool_calls", ()))
            values += ((number, "tool_calls", call.get("name")) for call in calls if isinstance(call, dict))
            values.append((number, "tool_call_id", each.get("tool_call_id")))
        text = self.text(marked, goes_on, settings)
        unseen = {field for mark, field in marks.items() if mark not in text}
        text = re.sub("|".join(marks) or "(?!)", "", text)  # templates check ids, to which no mark is added
        return sorted(unseen | {(number, name) for number, name, x in values if isinstance(x, str) and x not in text})

    def text(
        self,
        messages: Messages,
        goes_on: bool = False,
        settings: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The text of messages up to the beginning of the answer, as `ids`."""
        end = f"end{uuid.uuid4().hex}"
        if goes_on:
            messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{end} "}]
        if self.template:
            text = self.template.render(messages, not goes_on, settings or {}, now)
        else:
            self.template.check(settings or {})
            gaps = ["" if each["content"][:1].isspace() else " " for each in messages]  # an answer has its own
            lines = [f"{each['role']}:{gap}{each['content']}\n" for each, gap in zip(messages, gaps, strict=True)]
            text = "".join([*lines, "assistant:"])
        if not goes_on:
            return text
        text, found, behind = text.rpartition(end)
        if not found:
            raise UserError("continue_final_message: the model's template leaves the end of the last message out")
        return text if behind.startswith(" ") else text.rstrip()  # the template cuts space at the ends

    def _ids_of_template(self, text: str, words: _Words) -> list[int]:
        """Ids of what the template wrote: as the tokenizer takes it, but `words`, which are ordinary text."""
        if not words.found:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, at, before = list[int](), 0, None
        for found in [*self._special.finditer(text), None]:
            token = self._tokens[found[0]] if found else None
            part = words.shown(text[at : found.start() if found else None])
            part = part.lstrip() if before is not None and before.rstrip else part  # as Phi-3's tokens do
            part = part.rstrip() if token is not None and token.lstrip else part
            ids += self._ids_within(part, begins=before is None or self._begins_behind(str(before))) if part else []
            if found:
                ids.append(self.tokenizer.convert_tokens_to_ids(found[0]))
                at, before = found.end(), token
        return ids

    def _begins_behind(self, token: str) -> bool:
        """Whether the tokenizer takes a text behind a special token as one that begins, perhaps with a space."""
        if token not in self._beginning_behind:
            ids = self.tokenizer(f"{token}a", add_special_tokens=False)["input_ids"]
            self._beginning_behind[token] = ids[1:] == self.text_ids("a", False)
        return self._beginning_behind[token]

    def _ids_within(self, text: str, begins: bool) -> list[int]:
        """Ids of ordinary text. Where it does not begin, a tokenizer of pieces must not put a space before it, as it
        does at the beginning of a text: so it is read behind a line end.
        """
        if not begins:
            line, both = (self.text_ids(each, False) for each in ("\n", f"\n{text}"))
            if both[: len(line)] == line:
                return both[len(line) :]
        return self.text_ids(text, False)

    def decode(self, ids: Sequence[int], with_marks: bool = False) -> str:
        """The text of ids without special tokens. with_marks: but those around reasoning, for `parts`."""
        hidden = self._special_ids - self._marks_ids if with_marks else self._special_ids
        shown = [id for id in ids if id not in hidden]
        return self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of reasoning, which the template has written."""
        if self.marks is None:
            return False
        return self.tokenizer.decode(ids[-16:], skip_special_tokens=False).rstrip().endswith(self.marks.opening)

    def parts(self, text: str, whole: bool = True, opened: bool = False) -> tuple[str, str]:
        """The reasoning in an answer, and what follows it. opened: the prompt has begun it. whole: the answer has
        ended; before, what may be a part of a mark is left out.
        """
        if self.marks is None:
            return "", text
        opening, closing = self.marks
        if self.marks is CHANNELS and (text.startswith("<|") or not text):
            return _split_channels(text, whole)
        begun = text.lstrip()
        if not whole and opening.startswith(begun):  # it may become the mark, also once more behind the prompt's
            return "", ""
        if not opened and not begun.startswith(opening):
            return "", text
        reasoning, closed, answer = begun.removeprefix(opening).partition(closing)
        return (reasoning if closed or whole else _settled(reasoning, closing)).strip(), answer.lstrip()


def _split_channels(text: str, whole: bool) -> tuple[str, str]:
    """The reasoning and the answer in messages of gpt-oss, `<|channel|>NAME<|message|>…<|end|>`: what is not final is
    reasoning.
    """
    messages = re.findall(r"<\|channel\|>(\w*)(?:(?!<\|message\|>).)*<\|message\|>(.*?)(<\|end\|>|$)", text, re.DOTALL)
    parts: dict[bool, list[str]] = {True: [], False: []}
    for channel, content, ended in messages:
        parts[channel == "final"].append(content if ended or whole else _settled(content, "<|end|>"))
    return "\n".join(parts[False]), "".join(parts[True])


def _settled(text: str, mark: str) -> str:
    """A text without an end that may be the beginning of a mark."""
    parts = (mark[:length] for length in range(len(mark) - 1, 0, -1))
    return text.removesuffix(next((part for part in parts if text.endswith(part)), ""))


def _changed(change: Callable[[str], str], given: Any) -> Any:
    """The same with all its texts changed, at any depth."""
    if isinstance(given, str):
        return change(given)
    if isinstance(given, list):
        return [_changed(change, each) for each in given]
    if isinstance(given, dict):
        return {change(name): _changed(change, each) for name, each in given.items()}
    return given


class _Words:
    """Names of special tokens in messages, in whose places stand words that a template leaves as they are."""

    def __init__(self) -> None:
        self.found, self._mark = list[str](), f"token{uuid.uuid4().hex}x"

    def hide(self, found: re.Match[str]) -> str:
        """What stands for a name."""
        self.found.append(found[0])
        return f"{self._mark}{len(self.found) - 1}x"

    def shown(self, text: str) -> str:
        """The text with the names in their places again."""
        return re.sub(rf"{self._mark}(\d+)x", lambda found: self.found[int(found[1])], text)
