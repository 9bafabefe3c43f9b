"""Answers of a model with landmarks, token by token; requests take turns at the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from landmark.utils.errors import UserError

LEAST_TEMPERATURE = 1e-3  # below it float32 scores would overflow


@dataclass
class Answer:
    """An answer while it is made. tokens: ids so far. finish: "stop" or "length" at the end, None before."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


class Answering:
    """Reads prompts and samples answers. One step, a chunk of a prompt or a token, is computed at a time, and between
    steps other requests take their turn.

    model: a model with landmarks. tokenizer: of transformers.
    """

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model.eval(), tokenizer
        self._turn = threading.Lock()
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens. Raises UserError for an empty one."""
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if not ids:
            raise UserError("the prompt has no text")
        return ids

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of messages, by the tokenizer's template for chats, or as lines of role and content without one.

        Raises UserError for messages that the template refuses.
        """
        if self.tokenizer.chat_template:
            try:
                return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            except TemplateError as error:
                raise UserError(f"messages: the model's template refuses them ({error})") from error
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.ids("".join(lines) + "assistant:")

    def read(self, ids: Sequence[int], cache: Any) -> Tensor:
        """Read more of a text, and return the logits of the next token, (vocabulary,)."""
        local, logits = self.model.landmarks.local, None
        cache.expect(len(ids))
        for start in range(0, len(ids), local):
            chunk = torch.tensor([list(ids[start : start + local])], device=self.model.device)
            with self._turn, torch.inference_mode():
                logits = self.model(chunk, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        assert logits is not None
        return logits

    def answer(
        self,
        ids: Sequence[int],
        cache: Any,
        answer: Answer,
        *,
        most: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Iterator[str]:
        """Read a prompt, and give the text of the answer piece by piece.

        Args:
            ids: of the prompt.
            cache: the memory, which reads the prompt and the answer.
            answer: is filled.
            most: tokens of the answer.
            temperature: 0, or nearly 0, for the most probable token each time.
            top_p: the most probable tokens that together have this probability are sampled.
            stop: texts that end the answer, and are not part of it.
            seed: of the random numbers; None: another one each time.
        """
        if cache.get_seq_length() and len(ids) > 1 and ids[0] == self.tokenizer.bos_token_id:
            ids = ids[1:]  # the text has begun
            answer.prompt_tokens -= 1
        temperature = temperature if temperature >= LEAST_TEMPERATURE else 0
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        warpers = LogitsProcessorList()
        if temperature > 0:
            warpers.append(TemperatureLogitsWarper(float(temperature)))
        if temperature > 0 and top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        logits, given, end = self.read(ids, cache), 0, None
        decoding = Decoding(self.tokenizer, answer.tokens)
        while answer.finish is None:
            logits = logits.clone()
            if self.model.landmarks.token is not None:
                logits[self.model.landmarks.token] = -torch.inf
            no_ids: Any = torch.empty(1, 0, dtype=torch.int64)
            scores = warpers(no_ids, cast(Any, logits[None].float().cpu()))[0]
            token = int(scores.argmax()) if temperature == 0 else _sample(scores, generator)
            if token in self._ends:
                answer.finish, end = "stop", token
            else:
                answer.tokens.append(token)
                answer.finish = "length" if len(answer.tokens) >= most else None
            text = decoding.text(whole=answer.finish is not None)
            found = [at for each in stop if (at := text.find(each, given)) >= 0]
            if found:
                answer.finish, text = "stop", text[: min(found)]
            answer.text = text
            held = 0 if answer.finish else max((len(each) - 1 for each in stop), default=0)
            if len(text) - held > given:
                yield text[given : len(text) - held]
                given = len(text) - held
            logits = self.read([token], cache) if answer.finish is None else logits
        if end is not None or answer.finish == "length":
            self.read([answer.tokens[-1] if end is None else end], cache)  # a session goes on behind the whole answer


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


def _sample(scores: Tensor, generator: torch.Generator | None) -> int:
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
