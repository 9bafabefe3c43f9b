"""Answers of a model with landmarks, token by token; requests take turns at the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from landmark.huggingface import Chats, PrefixCache
from landmark.huggingface.families import head_dim, landmark_layers, text_config
from landmark.huggingface.prefixes import BYTES
from landmark.utils.chats import Separation
from landmark.utils.constants import LEAST_TEMPERATURE
from landmark.utils.errors import UserError

Progress = Callable[[int, int], None]


class Gone(Exception):
    """The client of a request has left: nobody waits for the answer."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is made. most: tokens. temperature, top_p, top_k (0: all), min_p, repetition_penalty: as in
    transformers, but 0 is a temperature too. stop: texts that end the answer, and are no part of it.
    """

    most: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()

    @property
    def draws(self) -> bool:
        return self.temperature >= LEAST_TEMPERATURE

    def warpers(self) -> LogitsProcessorList:
        """What changes the scores (1, vocabulary) before a token is chosen."""
        warpers = LogitsProcessorList()
        if self.repetition_penalty != 1:
            warpers.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.draws:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k:
                warpers.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                warpers.append(TopPLogitsWarper(self.top_p))
            if self.min_p:
                warpers.append(MinPLogitsWarper(self.min_p))
        return warpers


@dataclass
class Answer:
    """An answer while it is made. said: its reasoning and its text. tokens: ids so far. finish: "stop" or "length";
    None before the end.
    """

    said: Separation = field(default_factory=Separation)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True)
class Piece:
    """More of an answer. finish: as in `Answer`."""

    text: str
    reasoning: str
    finish: str | None


class Answering:
    """Reads prompts and samples answers. After each step, a chunk of a prompt or a token, others take their turn."""

    def __init__(self, model: Any, tokenizer: Any, most_bytes: int = BYTES):
        self.model, self.tokenizer, self.chats = model.eval(), tokenizer, Chats(tokenizer)
        self.prefixes = PrefixCache(model, most_bytes)
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}

    def ids(self, text: str | list[int], begins: bool = True) -> list[int]:
        """Ids of a text, or these ids. begins: nothing was read before. Raises UserError for none or unknown ids."""
        landmark = self.model.landmarks.token
        ids = self.tokenizer(text, add_special_tokens=begins)["input_ids"] if isinstance(text, str) else text
        if isinstance(text, str) and landmark in ids:
            ids = self.chats.text_ids(text, begins)
        if not ids or not text:
            raise UserError("the prompt has no text")
        count = self.model.get_input_embeddings().num_embeddings
        if wrong := [each for each in ids if not 0 <= each < count or each == landmark]:
            but = "" if landmark is None else f", without {landmark}"
            raise UserError(f"prompt: {wrong[0]} is no id of a text: ids are from 0 to {count - 1}{but}")
        return ids

    def read(
        self, ids: Sequence[int], cache: Any, gone: threading.Event | None = None, progress: Progress | None = None
    ) -> Tensor:
        """Read more of a text; the logits of the next token, (vocabulary,), float32 on the CPU, the landmark ruled out.
        progress: gets the tokens read, and all. Raises Gone where the client has left.
        """
        settings, start = self.model.landmarks, 0
        step, before = settings.local, cache.get_seq_length()
        if settings.token is None:  # as the model cuts a text, so that requests that are cut otherwise are read alike
            step = max(settings.block_size, step // settings.block_size * settings.block_size)
        with self.prefixes.lock:
            cache.expect(len(ids))
        logits = None
        while start < len(ids):
            stop = min(len(ids), start + step - ((before + start) % step if settings.token is None else 0))
            with self.prefixes.lock, torch.inference_mode():
                if gone is not None and gone.is_set():
                    raise Gone
                chunk = torch.tensor([list(ids[start:stop])], device=self.model.device)
                reading = {"past_key_values": cache, "logits_to_keep": 1, "known": stop < len(ids)}
                logits, start = self.model(chunk, **reading).logits[0, -1], stop
            if progress is not None:
                progress(stop, len(ids))
        assert logits is not None
        logits = logits.float().cpu().clone()
        if self.model.landmarks.token is not None:
            logits[self.model.landmarks.token] = -torch.inf
        return logits

    def bytes_of(self, tokens: int) -> int:
        """About the bytes of a memory of so many tokens: keys and values of the layers that keep all of them."""
        config, layers = text_config(self.model), len(landmark_layers(self.model))
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return 2 * tokens * layers * heads * head_dim(config) * self.model.dtype.itemsize

    def answer(
        self,
        ids: Sequence[int],
        cache: Any,
        answer: Answer,
        sampling: Sampling,
        generator: torch.Generator,
        gone: threading.Event,
    ) -> Iterator[Piece]:
        """Read the rest of a prompt, and give its answer piece by piece. cache: has read a beginning; it reads all but
        the answer's last token. answer: is filled. Raises Gone.
        """
        logits, given = self.read(ids[cache.get_seq_length() :], cache, gone), 0
        warpers, decoding = sampling.warpers(), Decoding(self.tokenizer, answer.tokens)
        while answer.finish is None:
            occurred = torch.tensor([[*ids, *answer.tokens] if sampling.repetition_penalty != 1 else []])
            scores = warpers(cast(Any, occurred), cast(Any, logits[None]))[0]
            token = int(scores.argmax())
            if sampling.draws:
                token = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
            if token in self._ends:
                answer.finish = "stop"
            else:
                answer.tokens.append(token)
                answer.finish = "length" if len(answer.tokens) >= sampling.most else None
            text = decoding.text(whole=answer.finish is not None)
            if found := [at for each in sampling.stop if (at := text.find(each, given)) >= 0]:
                answer.finish, text = "stop", text[: min(found)]
            held = 0 if answer.finish else max((len(each) - 1 for each in sampling.stop), default=0)
            given = max(given, len(text) - held)
            reasoning, content = answer.said.more(text[:given], answer.finish is not None)
            yield Piece(content, reasoning, answer.finish)
            if answer.finish is None:
                logits = self.read([token], cache, gone)


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
