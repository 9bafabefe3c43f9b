"""Rendering a model's own template for chats, which comes with the model and is not trusted to end."""

from __future__ import annotations

import inspect
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import FrameType
from typing import Any

import jinja2.meta

from landmark.utils.errors import UserError, in_one_line

SECONDS, CHARACTERS = 10.0, 1 << 26  # most of a rendering, and of what it gives
_ALONE, _RUNS, _RESTS = 0.1, 0.001, 0.01  # seconds: how long one keeps other threads waiting, and what it then does


class _TooLong(BaseException):  # a template's own filters catch Exception
    pass


_clock = threading.local()  # now: what a template of this thread takes for the time


def _strftime_now(format: str) -> str:
    return (getattr(_clock, "now", None) or datetime.now()).strftime(format)


def _watch(seconds: float) -> None:
    """End the template that this thread renders after some seconds, and let other threads run beside it: a loop in
    Python gives way every 5 ms only, and an answer asks for its turn hundreds of times.
    """
    ends = time.monotonic() + seconds
    gives_way = time.monotonic() + _ALONE

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal gives_way
        now = time.monotonic()
        if now > ends:
            raise _TooLong
        if now > gives_way:
            time.sleep(_RESTS)
            gives_way = time.monotonic() + _RUNS
        return trace if frame.f_code.co_filename == "<template>" else None

    sys.settrace(trace)


class Template:
    """The template of a tokenizer of transformers, in the sandbox of transformers."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __bool__(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @cached_property
    def source(self) -> str:
        """Its text; empty: the tokenizer has none."""
        try:
            return self._tokenizer.get_chat_template() if self else ""
        except ValueError as error:
            raise UserError(f"the model's template for chats: {in_one_line(error)}") from error

    @property
    def _compiled(self) -> jinja2.Template:
        """As transformers compiles it, and keeps it for `apply_chat_template`."""
        from transformers.utils import chat_template_utils

        return chat_template_utils._compile_jinja_template(self.source)

    @cached_property
    def settings(self) -> set[str]:
        """The names that the template reads beside the messages, as `enable_thinking`."""
        try:
            compiled = self._compiled
            read = jinja2.meta.find_undeclared_variables(compiled.environment.parse(self.source))
        except jinja2.TemplateError as error:
            raise UserError(f"the model's template for chats is damaged: {in_one_line(error)}") from error
        ours = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        return read - ours - set(self._tokenizer.special_tokens_map) - set(compiled.environment.globals)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise UserError for settings that the template does not read, or that are no text, number or boolean."""
        for name, value in given.items():
            if not self or name not in self.settings:
                has = ", ".join(sorted(self.settings)) if self else ""
                raise UserError(
                    f"the model's template for chats has no setting {ascii(name)[1:-1]}, only: {has or '-'}"
                )
            if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
                raise UserError(f"the template's setting {name} must be a text, a number, true or false")
            if str(value).lower() in ("true", "false") and isinstance(value, str):  # which a template takes for true
                raise UserError(f"the template's setting {name} is the text {value!r}: leave out the quotes")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: bool,
        settings: Mapping[str, Any],
        now: datetime | None = None,
    ) -> str:
        """The text of messages. answers: an answer begins at its end. settings: of the template. now: the time that the
        template may write (None: that of the clock). Raises UserError for settings as `check`, for messages that it
        refuses, and where it does not end in SECONDS, or gives too much.
        """
        self.check(settings)
        found: list[str | BaseException] = []

        def render() -> None:
            try:
                given = {"add_generation_prompt": answers, "tokenize": False, **settings}
                _clock.now = now
                self._compiled.environment.globals["strftime_now"] = _strftime_now
                _watch(SECONDS)
                found.append(self._tokenizer.apply_chat_template(messages, **given))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=render, daemon=True)
        thread.start()
        thread.join(SECONDS)
        text = found[0] if found else _TooLong()  # which it raises itself, or will
        if isinstance(text, _TooLong):
            raise UserError(f"messages: the model's template was not done with them in {SECONDS:g} s")
        if isinstance(text, BaseException):
            raise UserError(f"messages: the model's template refuses them ({in_one_line(text)[:300]})") from text
        if len(text) > CHARACTERS:
            raise UserError(f"messages: the model's template makes more than {CHARACTERS:,} characters of them")
        return text
