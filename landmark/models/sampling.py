"""How the next token is chosen, and the loop that generates, which all models share. Needs no transformers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landmark.utils.constants import LEAST_TEMPERATURE
from landmark.utils.errors import UserError
from landmark.utils.setting import check_field, setting

GUESSED = 3  # tokens guessed at a time, and tokens that must have stood before: measured on 60 questions
USUAL_TOP_K = 50  # of transformers, where a model draws and its generation_config does not say


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Raises UserError for a setting out of range.

    temperature: divides the logits; 0: the most probable token is taken. top_k: of the most probable tokens one is
    drawn (None, 0: of all). top_p: of the most probable ones that together have this probability. min_p: of those with
    this share of the best one's probability. repetition_penalty: tokens that the text has are less probable (above 1),
    as in transformers, whether one draws or not. seed: with a prompt's number it seeds the prompt's own random numbers,
    which do not depend on other prompts.
    """

    temperature: float = setting(0.0, least=0, most=100)
    top_k: int | None = setting(None, least=0)
    top_p: float = setting(1.0, above=0, most=1)
    min_p: float = setting(0.0, least=0, below=1)
    repetition_penalty: float = setting(1.0, least=0.01, most=100)
    seed: int = 0

    def __post_init__(self):
        for item in fields(self):
            check_field(f"generate.{item.name}", getattr(self, item.name), item)

    @classmethod
    def from_config(cls, config: Any, **given: Any) -> Sampling:
        """The sampling that a model's `generation_config` recommends (None: greedy), with what is given in its place.

        As transformers reads it: without `do_sample` the most probable token is taken, with the penalty alone. given:
        settings of this class; None: as recommended.
        """
        recommended = {}
        if config is not None:
            drawn = ("temperature", "top_k", "top_p", "min_p") if config.do_sample else ()
            usual = {"temperature": 1.0, "top_k": USUAL_TOP_K} if config.do_sample else {}
            found = {name: getattr(config, name, None) for name in (*drawn, "repetition_penalty")}
            recommended = usual | {name: value for name, value in found.items() if value is not None}
        return cls(**recommended | {name: value for name, value in given.items() if value is not None})

    def generator(self, prompt: int) -> torch.Generator:
        """The random numbers for the prompt with this number."""
        entropy = np.random.SeedSequence([self.seed % 2**64, prompt]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0] >> np.uint64(1)))

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Choose a token. logits: (V,). Of equally probable tokens the lower id comes first. Raises UserError where no
        distribution can be made of them.
        """
        if self.temperature < LEAST_TEMPERATURE:
            token = int(logits.argmax())
            if not bool(logits[token].isfinite()):
                raise self._no_distribution()
            return token
        ordered, tokens = logits.double().cpu().sort(descending=True, stable=True)
        probabilities = (ordered[: self.top_k or None] / self.temperature).softmax(0)
        if not bool(probabilities.isfinite().all()):
            raise self._no_distribution()
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities * ((before < self.top_p) & (probabilities >= self.min_p * probabilities[0]))
        return int(tokens[probabilities.multinomial(1, generator=generator)])

    def _no_distribution(self) -> UserError:
        values = ", ".join(f"{item.name}={getattr(self, item.name)}" for item in fields(self)[:-1])
        return UserError(f"the model's logits are not finite, so no token can be chosen ({values})")


class Chooser:
    """Chooses the tokens of one text. never: an id that is not chosen, as the landmark's."""

    def __init__(self, sampling: Sampling, text: Sequence[int], number: int = 0, never: int | None = None):
        """text: ids of the prompt. number: of the prompt, for its random numbers."""
        self._sampling, self._generator, self._never = sampling, sampling.generator(number), never
        self._seen = list(dict.fromkeys(text)) if sampling.repetition_penalty != 1 else None

    def __call__(self, logits: Tensor) -> int:
        """The next token. logits: (V,)."""
        if self._never is not None or self._seen is not None:
            logits = logits.clone()
        if self._never is not None:
            logits[self._never] = -torch.inf
        if self._seen is not None:
            logits = logits.double()
            seen, penalty = torch.tensor(self._seen, device=logits.device), self._sampling.repetition_penalty
            scores = logits[seen]
            logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
        token = self._sampling.draw(logits, self._generator)
        if self._seen is not None and token not in self._seen:
            self._seen.append(token)
        return token


def decode_loop(
    logits: Tensor,
    read: Callable[[Tensor], Tensor],
    choose: Sequence[Callable[[Tensor], int]],
    most: int,
    ends: Container[int] = (),
) -> Iterator[list[int | None]]:
    """Generate: each step gives the next token of every text, None for a text that has ended.

    logits: (B, V), after the prompts. read: reads tokens (B, 1), and returns the logits (B, V) after them. choose: of
    each text. most: steps. ends: tokens that end a text, and are no part of it.
    """
    ended = [False] * len(logits)
    for step in range(most):
        drawn = [each(row) for each, row in zip(choose, logits, strict=True)]
        ended = [before or token in ends for before, token in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        yield [None if done else token for done, token in zip(ended, drawn, strict=True)]
        if step + 1 < most:
            logits = read(torch.tensor(drawn, device=logits.device)[:, None])


def lookup_loop(
    logits: Tensor,
    read: Callable[[Tensor], Tensor],
    cache: Any,
    choose: Callable[[Tensor], int],
    text: Sequence[int],
    most: int,
    ends: Container[int] = (),
) -> Iterator[list[int | None]]:
    """As `decode_loop` of one text, with the same tokens: several are read at a time where the text may repeat itself.

    The tokens that follow are guessed from the text (prompt lookup, Saxena 2023). Each is chosen as always, from the
    logits after those before it, and the guesses from the first wrong one on are taken back.

    logits: (1, V). read: reads tokens (1, n), and returns the logits (n, V) after each. cache: what it reads with; it
    takes guesses as a `LandmarkCache` does. text: ids of the prompt.
    """
    if not most:
        return
    seen, left, token = np.array(text, dtype=np.int64), most, choose(logits[0])
    while token not in ends:
        yield [token]
        left -= 1
        if not left:
            return
        seen = np.append(seen, token)
        guesses = guessed(seen)[: left - 1] if cache.takes_guesses(1 + GUESSED) else []
        rows, right = read(torch.tensor([[token, *guesses]], device=logits.device)), 0
        try:
            for row, guess in zip(rows, [*guesses, None], strict=True):
                token = choose(row)
                if token != guess or token in ends:
                    break
                yield [token]
                left, right, seen = left - 1, right + 1, np.append(seen, token)
        finally:  # also where nobody wants the rest
            cache.forget(len(guesses) - right)


def guessed(text: np.ndarray) -> list[int]:
    """How a text, ids (n,), may go on: as behind the last place where its last tokens stood before."""
    if len(text) <= GUESSED:
        return []
    same = np.ones(len(text) - GUESSED, dtype=bool)
    for back in range(1, GUESSED + 1):
        same &= text[GUESSED - back : len(text) - back] == text[len(text) - back]
    places = same.nonzero()[0]
    return text[places[-1] + GUESSED :][:GUESSED].tolist() if len(places) else []
