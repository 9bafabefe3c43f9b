"""Continuing prompts token by token, read in chunks with a memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from landmark.memory import Memory, RecurrentMemory
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.models.decoder import Decoder, DecoderConfig

LOCAL = 250  # tokens of a prompt that a landmark model is fed at a time
AnyMemory = Memory | RecurrentMemory
Prompts = Tensor | Sequence[Tensor | np.ndarray | Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Raises UserError where a setting is out of range.

    temperature: of the logits; 0 takes the most probable token. top_k: only so many of the most probable tokens
    (None: all). top_p: only the most probable tokens that together have this probability, at least one. seed: every
    prompt has a generator of its own, made of the seed and the prompt's number, so that what it draws does not depend
    on the others.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise UserError(f"generate.temperature={self.temperature}: must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"generate.top_k={self.top_k}: must be at least 1")
        if not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p={self.top_p}: must be above 0 and at most 1")

    def generator(self, prompt: int) -> torch.Generator:
        entropy = np.random.SeedSequence([self.seed, prompt]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0] >> np.uint64(1)))

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token by its logits (V,). Among equally probable ones the first comes first."""
        if self.temperature == 0:
            return int(logits.argmax())
        ordered, tokens = logits.double().cpu().sort(descending=True, stable=True)
        probabilities = (ordered[: self.top_k] / self.temperature).softmax(0)
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities * (before < self.top_p)
        return int(tokens[probabilities.multinomial(1, generator=generator)])


@torch.no_grad()
def stream(
    model: Decoder,
    prompts: Prompts,
    tokens: int,
    *,
    local: int | None = None,
    memory: AnyMemory | Callable[[], AnyMemory] | None = None,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[list[int | None]]:
    """The next token of every prompt, step by step, at most so many; None for prompts that have ended.

    prompts: raw ids, one sequence each, of any lengths; those of one length are read together, others in turn. With
    `tokens` 0 they are read and nothing is generated. local: tokens of a prompt fed at a time (None: 250; a plain
    transformer's whole prompt; Transformer-XL's window). memory: what the prompts follow, an empty memory or one that
    has read something; a function that makes empty ones, for prompts of several lengths; or None for the model's own,
    in which a plain transformer keeps everything. sampling: None takes the most probable token. stop: tokens that end
    a text and are no part of it. limit: most tokens of a prompt. progress: called with tokens of the prompts read, and
    in all.

    Raises UserError for a prompt that is empty, longer than the limit, or has ids that are no text.
    """
    sampling, config = sampling or Sampling(), model.config
    rows = [torch.as_tensor(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
    _check(rows, config, limit)
    by_length = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    groups = [list(same) for _, same in itertools.groupby(by_length, key=lambda n: len(rows[n]))]
    if memory is not None and not callable(memory) and len(groups) > 1:
        raise UserError("prompts of several lengths cannot follow one memory: give a function that makes memories")
    device, generators = next(model.parameters()).device, [sampling.generator(n) for n in range(len(rows))]
    texts: list[tuple[list[int], AnyMemory, Tensor]] = []
    read, total = 0, sum(map(len, rows))
    for group in groups:
        together = torch.stack([rows[n] for n in group])
        given = _own_memory(model, together, tokens) if memory is None else memory
        of_group = given() if callable(given) else given
        logits = together
        for chunk in together.split(local or _natural(config, together.shape[1]), 1):
            logits = model(chunk.to(device), memory=of_group, last=True)
            read += chunk.numel()
            if progress is not None:
                progress(read, total)
        texts.append((group, of_group, logits))
    ended = [False] * len(rows)
    for step in range(tokens):
        chosen: list[int | None] = [None] * len(rows)
        for number, (group, of_group, logits) in enumerate(texts):
            if all(ended[n] for n in group):
                continue
            drawn = [sampling.draw(_text_alone(row, config), generators[n]) for n, row in zip(group, logits[:, -1])]
            for n, token in zip(group, drawn):
                ended[n] = ended[n] or token in stop
                chosen[n] = None if ended[n] else token
            if step + 1 < tokens and not all(ended[n] for n in group):
                logits = model(torch.tensor(drawn, device=device)[:, None], memory=of_group, last=True)
                texts[number] = group, of_group, logits
        if all(ended):
            return
        yield chosen


def generate(model: Decoder, prompts: Prompts, tokens: int, **settings) -> list[list[int]]:
    """What follows each prompt, at most so many tokens. settings: those of `stream`."""
    texts: list[list[int]] = [[] for _ in range(len(prompts))]
    for chosen in stream(model, prompts, tokens, **settings):
        for text, token in zip(texts, chosen, strict=True):
            if token is not None:
                text.append(token)
    return texts


def _check(prompts: list[Tensor], config: DecoderConfig, limit: int | None) -> None:
    if not prompts:
        raise UserError("there is no prompt: give at least one")
    for number, prompt in enumerate(prompts):
        if prompt.ndim != 1 or len(prompt) == 0:
            raise UserError(f"prompt {number} is empty: there is nothing to go on from")
        bad = (prompt < 0) | (prompt >= config.vocab_size)
        if bool(bad.any()):
            at = int(bad.nonzero()[0])
            raise UserError(
                f"prompt {number} has id {prompt[at]} at {at}, outside the vocabulary of {config.vocab_size}"
            )
        landmarks = prompt == config.landmark_id if config.landmark_id is not None else bad
        if bool(landmarks.any()):
            at = int(landmarks.nonzero()[0])
            raise UserError(
                f"prompt {number} has the landmark's id {config.landmark_id} at {at}: "
                "the model inserts landmarks itself, leave them out"
            )
    longest = max(range(len(prompts)), key=lambda n: len(prompts[n]))
    if limit is not None and len(prompts[longest]) > limit:
        raise UserError(
            f"prompt {longest} has {len(prompts[longest]):,} tokens, more than generate.limit={limit:,}: "
            "shorten it, or raise the limit"
        )


def _text_alone(logits: Tensor, config: DecoderConfig) -> Tensor:
    """Logits (V,) without the landmark's, which is never predicted."""
    if config.landmark_id is None:
        return logits
    return logits.index_fill(0, torch.tensor([config.landmark_id], device=logits.device), -torch.inf)


def _natural(config: DecoderConfig, length: int) -> int:
    """Tokens that this kind of model reads at a time."""
    return {"landmark": LOCAL, "transformer_xl": config.window or length}.get(config.kind, length)


def _own_memory(model: Decoder, prompts: Tensor, tokens: int) -> Callable[[], AnyMemory]:
    def make() -> AnyMemory:
        made = model.new_memory()
        return RecurrentMemory(prompts.shape[1] + tokens, model.config.rope_base) if made is None else made

    return make
