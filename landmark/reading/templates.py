"""Rendering a model's own template for chats, which comes with the model and is not trusted to end."""

from __future__ import annotations

import ctypes
import inspect
import math
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2.meta

from landmark.utils.errors import UserError, in_one_line

SECONDS, CHARACTERS = 10.0, 1 << 26  # most of a rendering, and of what it gives


class _TooLong(BaseException):  # a template's own filters catch Exception
    pass


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

    @cached_property
    def settings(self) -> set[str]:
        """The names that the template reads beside the messages, as `enable_thinking`."""
        from transformers.utils import chat_template_utils

        try:
            compiled = chat_template_utils._compile_jinja_template(self.source)
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
        template may write (None: that of the clock). Raises UserError for
        settings as `check`, for messages that it refuses, and where it does not end in SECONDS, or gives too much.
        """
        self.check(settings)
        found: list[str | BaseException] = []

        def render() -> None:
            try:
                given = {"add_generation_prompt": answers, "tokenize": False, **settings}
                given |= {} if now is None else {"strftime_now": now.strftime}
                found.append(self._tokenizer.apply_chat_template(messages, **given))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=render, daemon=True)
        thread.start()
        thread.join(SECONDS)
        if thread.is_alive():  # a loop of a template is one of Python, which this ends
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TooLong))
            raise UserError(f"messages: the model's template was not done with them in {SECONDS:g} s")
        (text,) = found
        if isinstance(text, BaseException):
            raise UserError(f"messages: the model's template refuses them ({in_one_line(text)[:300]})") from text
        if len(text) > CHARACTERS:
            raise UserError(f"messages: the model's template makes more than {CHARACTERS:,} characters of them")
        return text
