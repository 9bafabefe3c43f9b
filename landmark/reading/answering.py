"""Answers of a model of transformers, token by token; requests take turns at the model."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from landmark.models.huggingface import LandmarkCache, PrefixCache
from landmark.models.huggingface.families import numbers_per_token
from landmark.models.sampling import Chooser, Sampling, follow
from landmark.reading.answer import Answer, Delta
from landmark.reading.chats import Chats
from landmark.utils.errors import UserError

Progress = Callable[[int, int], None]
OWN_CHUNK = 512  # tokens that a model with its own cache reads at a time: short rows of scores, short waits
SHARED = 256  # tokens that are read in a turn while others wait


class Gone(Exception):
    """Nobody waits for the answer any more: the client of a request has left, or Ctrl-C was typed."""


class Answering:
    """Reads prompts and generates answers. After each step, a part of a prompt or a token, others take their turn.

    model: a `LandmarkModel`, or any other causal language model of transformers, whose cache is its own then.
    """

    def __init__(self, model: Any, tokenizer: Any, most_bytes: int | None = None, local: int | None = None):
        """most_bytes: of memories that are kept, as of `PrefixCache`. local: tokens that a model with landmarks reads
        at a time (None: as it was wrapped).
        """
        self.model, self.tokenizer, self.chats = model.eval(), tokenizer, Chats(tokenizer)
        self.landmark = getattr(getattr(model, "landmarks", None), "token", None)
        self.prefixes, self._local = PrefixCache(model, most_bytes), local if self.landmark is not None else None
        self._waiting = deque[None]()  # one for each thread that waits for the model
        ends = model.generation_config.eos_token_id
        self.ends = {*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id} - {None}

    def ids(self, text: str | list[int], begins: bool = True) -> list[int]:
        """Ids of a text, or these ids. begins: nothing was read before. Raises UserError as `checked`."""
        ids = self.tokenizer(text, add_special_tokens=begins)["input_ids"] if isinstance(text, str) else text
        if isinstance(text, str) and self.landmark in ids:
            ids = self.chats.text_ids(text, begins)
        return self.checked(ids if text else [])

    def checked(self, ids: list[int]) -> list[int]:
        """The ids of a text. Raises UserError for none or unknown ids."""
        if not ids:
            raise UserError("the prompt has no text")
        count = self.model.get_input_embeddings().num_embeddings
        if wrong := [each for each in ids if not 0 <= each < count or each == self.landmark]:
            but = "" if self.landmark is None else f", without {self.landmark}"
            raise UserError(f"prompt: {wrong[0]} is no id of a text: ids are from 0 to {count - 1}{but}")
        return ids

    def new_answer(self, ids: Sequence[int], is_chat: bool, stop: Sequence[str] = ()) -> Answer:
        """An answer to a prompt, of which nothing is there yet. is_chat: its reasoning is apart from its text."""
        if not is_chat:
            return Answer(self.chats.decode, stop, before=ids)
        parts = partial(self.chats.parts, opened=self.chats.opens_reasoning(ids))
        return Answer(partial(self.chats.decode, with_marks=True), stop, parts)

    def read(
        self, ids: Tensor, cache: Any, gone: threading.Event | None = None, progress: Progress | None = None
    ) -> Tensor:
        """Read more of texts of one length, ids (B, T); the logits (B, vocabulary) after them. cache: has read what is
        before. progress: gets the tokens read, and all. Raises Gone where nobody waits any more.
        """
        length, start, has_blocks = ids.shape[1], 0, isinstance(cache, LandmarkCache)
        logits = torch.empty(0)
        while start < length:
            with self._turn(), torch.inference_mode():
                if gone is not None and gone.is_set():
                    raise Gone
                if has_blocks and not start:
                    cache.expect(length)
                stop = start + self._next_stop(cache, length - start)
                given: dict[str, Any] = {"prefill": stop < length} if has_blocks else {}
                given |= {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
                given |= {} if self._local is None else {"local": self._local}
                logits = self.model(ids[:, start:stop].to(self.model.device), **given).logits[:, -1]
                logits, start = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True), stop
            if progress is not None:
                progress(stop, length)
        return logits

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the model, and be seen to wait for it."""
        self._waiting.append(None)
        with self.prefixes.lock:
            self._waiting.pop()
            yield

    def _next_stop(self, cache: Any, length: int) -> int:
        """How many of so many tokens are read in this turn: fewer where others wait, as it does not change a text that
        is read without landmarks.
        """
        if not isinstance(cache, LandmarkCache):
            return min(OWN_CHUNK, length)
        if self._local is not None:
            return min(self._local, length)
        return cache.stops(length, SHARED if self._waiting and self.landmark is None else None)[0]

    def answer(
        self,
        ids: Sequence[int],
        cache: Any,
        answer: Answer,
        sampling: Sampling,
        most: int,
        gone: threading.Event | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Delta]:
        """Read the rest of a prompt, and give its answer piece by piece. cache: has read a beginning; it reads all but
        the answer's last token. answer: is filled. most: tokens, at least one. progress: of the prompt. Raises Gone.
        """
        for (token,) in self.steps([ids], cache, sampling, most, gone, progress, answer.nats):
            yield answer.add(token, is_last=len(answer.tokens) + 1 >= most)
            if answer.finish is not None:
                return
        yield answer.add(None)

    def steps(
        self,
        texts: Sequence[Sequence[int]],
        cache: Any,
        sampling: Sampling,
        most: int,
        gone: threading.Event | None = None,
        progress: Progress | None = None,
        nats: list[float] | None = None,
    ) -> Iterator[list[int | None]]:
        """As `answer`, of prompts of one length: in each step the next token of every one, None where it has ended.
        nats: as of `Answer`.
        """
        rest = torch.tensor([list(ids[cache.get_seq_length() :]) for ids in texts])
        logits = self.read(rest, cache, gone, progress)
        choose: list[Callable[[Tensor], int]] = [
            Chooser(sampling, ids, number, self.landmark) for number, ids in enumerate(texts)
        ]
        if nats is not None:
            choose = [partial(_weighed, each, nats) for each in choose]
        return follow(logits, lambda tokens: self.read(tokens, cache, gone), choose, most, self.ends)

    def nats_of(self, ids: Sequence[int], tokens: Sequence[int], gone: threading.Event | None = None) -> list[float]:
        """The log of the probability of each token behind a short text, of which nothing was read. Raises Gone."""
        cache = self.prefixes.model.new_memory(**self.prefixes.settings)
        self.read(torch.tensor([list(ids[:-1])]), cache, gone)
        with self._turn(), torch.inference_mode():
            rest = torch.tensor([[ids[-1], *tokens[:-1]]], device=self.model.device)
            logits = self.model(rest, past_key_values=cache, use_cache=True, logits_to_keep=len(tokens)).logits[0]
            return (
                logits.float()
                .log_softmax(-1)
                .gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
                .tolist()
            )

    def bytes_of(self, tokens: int) -> int:
        """About the bytes of a memory of so many tokens: keys and values of the layers that keep all of them."""
        return tokens * numbers_per_token(self.model) * self.model.dtype.itemsize


def _weighed(choose: Callable[[Tensor], int], nats: list[float], logits: Tensor) -> int:
    """A token, and the logarithm of its probability, before temperature and penalties."""
    token = choose(logits)
    nats.append(float(logits.float().log_softmax(-1)[token]))
    return token
