"""An answer while it is made: from tokens, which come one by one, to its reasoning and its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Decode = Callable[[list[int]], str]
Parts = Callable[[str, bool], tuple[str, str]]


class Delta(NamedTuple):
    """More of an answer. finish: as of `Answer`."""

    text: str
    reasoning: str
    finish: str | None


@dataclass
class Answer:
    """An answer while it is made.

    decode: the text of ids. stop: texts that end it, and are no part of it. parts: its reasoning and what follows, of
    all that was said so far, and whether it has ended, as `Chats.parts`. before: ids of the prompt, where the answer's
    first token goes on in the middle of a text. tokens: ids so far. nats: a list that gets the log of each token's
    probability, if that is wanted. finish: "stop" or "length"; None before the end.
    """

    decode: Decode
    stop: Sequence[str] = ()
    parts: Parts = lambda text, ended: ("", text)
    before: Sequence[int] = ()
    reasoning: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    nats: list[float] | None = None
    finish: str | None = None

    def __post_init__(self) -> None:
        self._decoding, self._given = Decoding(self.decode, self.tokens, self.before), 0

    def add(self, token: int | None, is_last: bool = False) -> Delta:
        """Take the next token (None: the model has ended the answer). is_last: no further one is generated."""
        if token is None:
            self.finish = "stop"
        else:
            self.tokens.append(token)
            self.finish = "length" if is_last else None
        text = self._decoding.text(whole=self.finish is not None)
        if found := [at for each in self.stop if (at := text.find(each, self._given)) >= 0]:
            self.finish, text = "stop", text[: min(found)]
        held = 0 if self.finish else max((len(each) - 1 for each in self.stop), default=0)
        self._given = max(self._given, len(text) - held)
        before = self.reasoning, self.text
        self.reasoning, self.text = self.parts(text[: self._given], self.finish is not None)
        return Delta(self.text[len(before[1]) :], self.reasoning[len(before[0]) :], self.finish)


class Decoding:
    """The text of tokens that come one by one: only the last ones are decoded again, with those before as context."""

    def __init__(self, decode: Decode, tokens: list[int], before: Sequence[int] = ()):
        """before: ids that the tokens follow, as a context."""
        self._decode, self._tokens, self._before = decode, tokens, list(before[-8:])
        self._text, self._context, self._done = "", 0, 0

    def text(self, whole: bool) -> str:
        """The text so far; unless `whole`, without a last character of which only some bytes are there."""
        context = self._tokens[self._context : self._done] if self._done else self._before
        new = self._decode([*context, *self._tokens[self._done :]])[len(self._decode(context)) :]
        if not whole and new.endswith("\ufffd"):  # three bytes of four at most
            return self._text + new[:-3]
        if new:
            self._text += new
            self._context, self._done = self._done, len(self._tokens)
        return self._text
