"""Answers of a model with landmarks, token by token; requests take turns at the model."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from landmark.utils.errors import UserError

LEAST_TEMPERATURE = 1e-3  # below it float32 scores would overflow
Messages = Sequence[dict[str, str]]
PART = "token_id:"  # begins the name of a token that is no whole character


class Gone(Exception):
    """The client of a request has left: nobody waits for the answer."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is made.

    most: tokens of the answer. temperature: 0, or nearly 0, for the most probable token each time. top_p: the most
    probable tokens that together have this probability are sampled. stop: texts that end the answer, and are not part
    of it. probable: most probable tokens that are given with each token of the answer; None: no probabilities are.
    """

    most: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    probable: int | None = None

    def warpers(self) -> LogitsProcessorList:
        """What changes the scores (1, vocabulary) before a token is drawn; empty: the most probable token is taken."""
        warpers = LogitsProcessorList()
        if self.temperature >= LEAST_TEMPERATURE:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_p < 1:
                warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


@dataclass(frozen=True)
class Token:
    """A token of an answer with its log-probability in nats, before temperature and top_p, and the most probable ones.

    start: where its text begins in the answer, in characters.
    """

    text: str
    logprob: float
    probable: list[tuple[str, float]]
    start: int


@dataclass
class Answer:
    """An answer while it is made. tokens: ids so far. finish: "stop" or "length" at the end, None before."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


@dataclass(frozen=True)
class Piece:
    """More of an answer. index: of the answer among those of its request. finish: as in `Answer`."""

    index: int
    text: str
    tokens: list[Token]
    finish: str | None


class Answering:
    """Reads prompts and samples answers. One step, a chunk of a prompt or a token, is computed at a time, and between
    steps other requests take their turn.

    model: a model with landmarks. tokenizer: of transformers.
    """

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer, self.chats = model.eval(), tokenizer, Chats(tokenizer)
        self._turn = threading.Lock()
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}

    def ids(self, text: str | list[int]) -> list[int]:
        """Ids of a text without special tokens, or these ids.

        Raises UserError for an empty one, and for ids that the model does not read.
        """
        ids = self.chats.text_ids(text) if isinstance(text, str) else text
        if not ids:
            raise UserError("the prompt has no text")
        count, landmark = self.model.get_input_embeddings().num_embeddings, self.model.landmarks.token
        if wrong := [each for each in ids if not 0 <= each < count or each == landmark]:
            raise UserError(f"prompt: {wrong[0]} is no id of a text: ids are from 0 to {count - 1}, without {landmark}")
        return ids

    def read(self, ids: Sequence[int], cache: Any, gone: threading.Event | None = None) -> Tensor:
        """Read more of a text, and return the logits of the next token, (vocabulary,), on the CPU in float32.

        The landmark is ruled out. Raises Gone where the client has left.
        """
        local, logits = self.model.landmarks.local, None
        cache.expect(len(ids))
        for start in range(0, len(ids), local):
            with self._turn, torch.inference_mode():
                if gone is not None and gone.is_set():
                    raise Gone
                chunk = torch.tensor([list(ids[start : start + local])], device=self.model.device)
                logits = self.model(chunk, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        assert logits is not None
        logits = logits.float().cpu().clone()
        if self.model.landmarks.token is not None:
            logits[self.model.landmarks.token] = -torch.inf
        return logits

    def answers(
        self,
        ids: Sequence[int],
        cache: Any,
        answers: Sequence[Answer],
        sampling: Sampling,
        generator: torch.Generator,
        gone: threading.Event,
        first: int = 0,
    ) -> Iterator[Piece]:
        """Read a prompt, and give the text of its answers piece by piece, one answer after the other.

        The memory reads the prompt and the last answer. answers: are filled. first: index of the first one.
        Raises Gone where the client has left, which `gone` says.
        """
        logits = self.read(ids, cache, gone)
        for number, answer in enumerate(answers):
            own = cache
            if answer is not answers[-1]:
                with torch.inference_mode():
                    own = cache.select(torch.zeros(1, dtype=torch.int64))
            yield from self._answer(logits, own, answer, sampling, generator, gone, first + number)

    def _answer(
        self,
        logits: Tensor,
        cache: Any,
        answer: Answer,
        sampling: Sampling,
        generator: torch.Generator,
        gone: threading.Event,
        index: int,
    ) -> Iterator[Piece]:
        warpers, decoding = sampling.warpers(), Decoding(self.tokenizer, answer.tokens)
        given, end, no_ids = 0, None, cast(Any, torch.empty(1, 0, dtype=torch.int64))
        while answer.finish is None:
            scores = warpers(no_ids, cast(Any, logits[None]))[0]
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=generator) if warpers else scores.argmax())
            said = []
            if token in self._ends:
                answer.finish, end = "stop", token
            else:
                if sampling.probable is not None:
                    said = [self._scored(token, logits.log_softmax(-1), sampling.probable, len(answer.text))]
                answer.tokens.append(token)
                answer.finish = "length" if len(answer.tokens) >= sampling.most else None
            text = decoding.text(whole=answer.finish is not None)
            found = [at for each in sampling.stop if (at := text.find(each, given)) >= 0]
            if found:
                answer.finish, text = "stop", text[: min(found)]
            answer.text = text
            held = 0 if answer.finish else max((len(each) - 1 for each in sampling.stop), default=0)
            upto = max(given, len(text) - held)
            if answer.finish is None:
                yield Piece(index, text[given:upto], said, None)
                logits = self.read([token], cache, gone)
            else:
                # A session goes on behind the whole answer.
                if end is not None or answer.finish == "length":
                    self.read([token], cache, gone)
                yield Piece(index, text[given:], said, answer.finish)
            given = upto

    def _scored(self, token: int, logprobs: Tensor, probable: int, start: int) -> Token:
        best = logprobs.topk(probable)
        others = zip(map(self._text_of, best.indices.tolist()), best.values.tolist(), strict=True)
        return Token(self._text_of(token), float(logprobs[token]), list(others), start)

    def _text_of(self, token: int) -> str:
        """The text of a token, or its id where it is only some bytes of a character."""
        text = self.tokenizer.decode([token])
        return f"{PART}{token}" if "\ufffd" in text else text


class Decoding:
    """The text of tokens that come one by one: only the last ones are decoded again, with those before as context."""

    def __init__(self, tokenizer: Any, tokens: list[int]):
        self._tokenizer, self._tokens = tokenizer, tokens
        self._text, self._context, self._done = "", 0, 0

    def text(self, whole: bool) -> str:
        """The text so far; unless `whole`, without a last character of which only some bytes are there."""
        before = self._decode(self._tokens[self._context : self._done])
        new = self._decode(self._tokens[self._context :])[len(before) :]
        if not whole and new.endswith("\ufffd"):  # three bytes of four at most
            return self._text + new[:-3]
        if new:
            self._text += new
            self._context, self._done = self._done, len(self._tokens)
        return self._text

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


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

        1. With earlier messages (`before`), of which the last is an answer: what the template writes behind it.
        2. Without, where a text was read: all that it writes, but the token that begins a text.
        3. Where nothing was read: all that it writes.

        last: id that was read last, which may have ended the answer already; None: a new text. Raises UserError for
        messages that the template refuses, and for a template that leaves answers out.
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
