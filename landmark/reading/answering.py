"""Answers of a model of transformers, token by token; requests take turns at the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from landmark.models.huggingface import LandmarkCache, PrefixCache
from landmark.models.huggingface.chunked_forward import read_text
from landmark.models.huggingface.families import decoder_layers, numbers_per_token
from landmark.models.huggingface.prefixes import Saved
from landmark.models.sampling import Chooser, Sampling, decode_loop, lookup_loop
from landmark.reading.answer import Answer, Delta
from landmark.reading.chats import Chats
from landmark.utils.constants import LEAST_TEMPERATURE
from landmark.utils.errors import UserError

T = TypeVar("T")
OWN_CHUNK = 512  # tokens that a model with its own cache reads at a time: short rows of scores, short waits
PAUSE = 0.75  # seconds that a piece of reading may take while an answer is made or waits
SHARED = 128  # tokens that are read in such a time, until it is known; a prompt of no more goes before a long text


class Progress(NamedTuple):
    """How far a text is read: tokens read, and all."""

    read: int
    tokens: int


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
        self.prefixes, self._local = PrefixCache(model, most_bytes), local
        self._has_blocks = hasattr(model, "landmarks")
        # The last text of a model with its own cache, and that cache.
        self._own: tuple[list[int], Any] = [], None
        self.turns, self._pace = self.prefixes.lock, SHARED / PAUSE  # tokens a second of the last piece
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

    def new_memory(self) -> Any:
        """An empty one: of blocks, or the model's own cache."""
        if self._has_blocks:
            return self.model.new_memory(**self.prefixes.settings)
        return DynamicCache(config=self.model.config)

    @contextmanager
    def using(self, ids: Sequence[int], owner: str = "", saved: Saved | None = None) -> Iterator[Any]:
        """`PrefixCache.using`. A model with its own cache keeps the last one, which goes on with a longer text."""
        if self._has_blocks:
            with self.prefixes.using(ids, owner, saved) as cache:
                yield cache
            return
        before, cache = self._own
        read = 0 if cache is None else cache.get_seq_length()
        if not 0 < read <= len(before) or read >= len(ids) or before[:read] != [*ids[:read]]:
            cache = self.new_memory()
        self._own = [*ids], cache
        yield cache

    def new_answer(self, ids: Sequence[int], is_chat: bool, stop: Sequence[str] = ()) -> Answer:
        """An answer to a prompt, of which nothing is there yet. is_chat: its reasoning is apart from its text."""
        if not is_chat:
            return Answer(self.chats.decode, stop, before=ids)
        parts = partial(self.chats.parts, opened=self.chats.opens_reasoning(ids))
        return Answer(partial(self.chats.decode, with_marks=True), stop, parts)

    def read(
        self,
        ids: Tensor,
        cache: Any,
        gone: threading.Event | None = None,
        of_answer: bool = True,
        within: Callable[[int, int], None] | None = None,
        largest: int | None = None,
    ) -> Generator[Progress, None, Tensor]:
        """Read more of texts of one length, ids (B, T), piece by piece, and return the logits (B, vocabulary) after
        them. cache: has read what is before. of_answer: an answer needs it, which is counted (`Turns.answering`).
        within: told after each layer of a piece how many tokens are read by then, and in all. largest: tokens of a
        piece (None: as the model was wrapped). Raises Gone where nobody waits any more.
        """
        length, logits, ids = ids.shape[1], None, ids.to(self.model.device)
        most = read = 0
        steps = read_text(self.model, ids, cache, most=lambda: most)
        while read < length:
            before = read
            with self._turn(gone, is_long=not of_answer or length > SHARED):
                most, started = self._most(of_answer, largest), time.perf_counter()
                with self._layer_by_layer(before, min(length, before + most), length, within):
                    read, logits = next(steps)
                if logits is not None:
                    logits = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32), copy=True)
                if read == length:
                    next(steps, None)  # it ends
                self._pace = (read - before) / max(time.perf_counter() - started, 1e-6)
            yield Progress(read, length)
        assert logits is not None
        return logits

    @contextmanager
    def _layer_by_layer(
        self, start: int, stop: int, length: int, within: Callable[[int, int], None] | None
    ) -> Iterator[None]:
        """The model reads a piece, tokens start … stop of `length`. within: as of `read`."""
        if within is None:
            yield
            return
        layers, hooks = decoder_layers(self.model), list[Any]()
        for number, layer in enumerate(layers):
            read = start + (stop - start) * (number + 1) // (len(layers) + 1)
            hooks.append(layer.register_forward_hook(lambda *_, read=read: within(read, length)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _turn(self, gone: threading.Event | None, is_long: bool = False) -> Iterator[None]:
        """Hold the model. Raises Gone where nobody waits for the answer any more."""
        with self.turns.taken(is_long), torch.inference_mode():
            if gone is not None and gone.is_set():
                raise Gone
            yield

    def _most(self, of_answer: bool, largest: int | None) -> int:
        """Tokens that are read in this turn: fewer where another answer is made or waits, which changes no text without
        landmarks.
        """
        if not self._has_blocks:
            return OWN_CHUNK
        local = self.model.landmarks.local
        if self.landmark is not None:
            return self._local or local
        usual = min(local, largest or local)
        if self.turns.answers <= of_answer and not self.turns.are_wanted:
            return usual
        return min(usual, 1 << max(1, int(self._pace * PAUSE)).bit_length() - 1)  # whose multiples are all alike

    def answer(
        self,
        ids: Sequence[int],
        cache: Any,
        answer: Answer,
        sampling: Sampling,
        most: int,
        gone: threading.Event | None = None,
    ) -> Iterator[Progress | Delta]:
        """Read the rest of a prompt, and give its answer piece by piece. cache: has read a beginning; it reads all but
        the answer's last token. answer: is filled. most: tokens, at least one. Raises Gone.
        """
        for step in self.steps([ids], cache, sampling, most, gone, answer.nats):
            if isinstance(step, Progress):
                yield step
                continue
            yield answer.add(step[0], is_last=len(answer.tokens) + 1 >= most)
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
        nats: list[float] | None = None,
    ) -> Iterator[Progress | list[int | None]]:
        """As `answer`, of prompts of one length: in each step the next token of every one, None where it has ended.
        nats: as of `Answer`.
        """
        rest = torch.tensor([list(ids[cache.get_seq_length() :]) for ids in texts])
        logits = yield from self.read(rest, cache, gone)
        choosers = [Chooser(sampling, ids, number, self.landmark) for number, ids in enumerate(texts)]
        choose = choosers if nats is None else [partial(_weighed, each, nats) for each in choosers]
        read = partial(self._read_tokens, cache, gone)
        is_greedy = sampling.temperature < LEAST_TEMPERATURE
        if len(texts) == 1 and isinstance(cache, LandmarkCache) and is_greedy:
            yield from lookup_loop(logits, read, cache, choose[0], texts[0], most, self.ends)
        else:
            yield from decode_loop(logits, read, choose, most, self.ends)

    def _read_tokens(self, cache: Any, gone: threading.Event | None, tokens: Tensor) -> Tensor:
        """The logits (B·n, vocabulary) after n tokens of each answer, (B, n). Raises Gone."""
        with self._turn(gone):
            given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": tokens.shape[1]}
            logits = self.model(tokens, **given).logits.flatten(0, 1)
            return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)

    def bytes_of(self, tokens: int) -> int:
        """About the bytes of a memory of so many tokens: keys and values of the layers that keep all of them."""
        return tokens * numbers_per_token(self.model) * self.model.dtype.itemsize


def _weighed(choose: Callable[[Tensor], int], nats: list[float], logits: Tensor) -> int:
    """A token, and the log of its probability, before temperature and penalties."""
    token = choose(logits)
    nats.append(float(logits.float().log_softmax(-1)[token]))
    return token


def finished(reading: Generator[Progress, None, T], progress: Callable[[int, int], None] | None = None) -> T:
    """The result of a reading, read to its end. progress: called with tokens read, and in all."""
    while True:
        try:
            read, tokens = next(reading)
        except StopIteration as end:
            return end.value
        if progress is not None:
            progress(read, tokens)
