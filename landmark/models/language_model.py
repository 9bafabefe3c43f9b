"""The interface of all models: logits with a memory, losses of training windows, and generation."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.models.config import DecoderConfig
from landmark.utils.constants import DEFAULT_CHUNK, LEAST_TEMPERATURE, NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.setting import check_field, setting
from landmark.utils.window_batch import WindowBatch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Raises UserError for a setting out of range.

    temperature: divides the logits; 0: the most probable token is chosen. top_k: of the most probable tokens one is
    drawn. top_p: of the most probable ones that together have this probability. seed: with a prompt's number it seeds
    the prompt's own random numbers, which do not depend on other prompts.
    """

    temperature: float = setting(0.0, least=0)
    top_k: int | None = setting(None, least=1)
    top_p: float = setting(1.0, above=0, most=1)
    seed: int = 0

    def __post_init__(self):
        for item in fields(self):
            check_field(f"generate.{item.name}", getattr(self, item.name), item)

    def generator(self, prompt: int) -> torch.Generator:
        """The random numbers for the prompt with this number."""
        entropy = np.random.SeedSequence([self.seed, prompt]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0] >> np.uint64(1)))

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token. logits: (V,). Of equally probable tokens the lower id comes first."""
        if self.temperature < LEAST_TEMPERATURE:
            return int(logits.argmax())
        ordered, tokens = logits.double().cpu().sort(descending=True, stable=True)
        probabilities = (ordered[: self.top_k] / self.temperature).softmax(0)
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities * (before < self.top_p)
        return int(tokens[probabilities.multinomial(1, generator=generator)])


Prompts = Tensor | Sequence[Tensor | np.ndarray | Sequence[int]]
Progress = Callable[[int, int], None]


class LanguageModel(nn.Module):
    """Base class of our decoder and of transformers models. Subclasses implement the methods that raise here.

    Generation:

    1. Prompts of the same length form a group. It has one memory, and is read as a batch, chunk by chunk.
    2. For each prompt that has not ended, draw the next token from the logits after its last token.
    3. Each group reads its drawn tokens as one more chunk, unless all its prompts have ended. Continue with step 2.
    """

    config: DecoderConfig

    def num_parameters(self) -> int:
        """Number of parameters, with the embeddings."""
        return sum(p.numel() for p in self.parameters())

    def input_embeddings(self) -> nn.Embedding:
        raise NotImplementedError

    def new_memory(self, **settings) -> Any:
        """An empty memory that fits this model, or None where the model keeps nothing between chunks."""
        raise NotImplementedError

    def unlimited_memory(self, tokens: int) -> Any:
        """An empty memory that keeps everything of `tokens` tokens, for a model whose `new_memory()` is None."""
        raise NotImplementedError

    def announce(self, memory: Any, tokens: int) -> None:
        """Let a memory get ready for so many tokens more, which are read in parts."""

    def reading(self, memory: Any) -> Callable[[Tensor], Tensor]:
        """How generated tokens (B, 1) are read with a memory that has read the prompts: returns logits (B, 1, V)."""
        return partial(self, memory=memory, last=True)

    def forward(self, tokens: Tensor, memory: Any = None, last: bool = False) -> Tensor:
        """Logits of the next token (B, T, vocabulary) after raw ids (B, T), or with `last` (B, 1, vocabulary)."""
        raise NotImplementedError

    def read_on(self, tokens: Tensor, memory: Any) -> None:
        """Read raw ids (B, T) of a text that goes on, so that no logits are needed."""
        self(tokens, memory=memory, last=True)

    def compile_parts(self) -> None:
        """Let `torch.compile` make few kernels of what is not attention. Raises UserError where it cannot."""
        raise UserError("trainer.compile=true: is for models of ours")

    def window_losses(self, batch: WindowBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Summed loss in nats, and number of targets, of each window of a batch."""
        raise NotImplementedError

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> list[str]:
        """Write configuration and weights, or the weights of `state`; returns the names of the files."""
        raise NotImplementedError

    def generate(self, prompts: Prompts, tokens: int, **settings) -> list[list[int]]:
        """The continuation of each prompt, of at most `tokens` tokens. settings: further arguments of `stream`."""
        texts: list[list[int]] = [[] for _ in range(len(prompts))]
        for chosen in self.stream(prompts, tokens, **settings):
            for text, token in zip(texts, chosen, strict=True):
                if token is not None:
                    text.append(token)
        return texts

    @torch.no_grad()
    def stream(
        self,
        prompts: Prompts,
        tokens: int,
        *,
        local: int | None = None,
        memory: Any = None,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> Iterator[list[int | None]]:
        """Generate step by step. Each step yields the next token of every prompt, None for prompts that have ended.

        prompts: raw ids, one sequence each, of any lengths. tokens: most steps; 0: the prompts are read and nothing is
        generated. local: tokens of a prompt that are read at a time; None: as many as this kind of model usually reads.
        memory: one whose text the prompts continue, or a function that makes empty ones, required for prompts of
        several lengths; None: `new_memory()`, and a plain transformer keeps everything. sampling: None: the most
        probable token is taken. stop: tokens that end a text; they are not part of it. progress: called with the
        prompts' tokens read so far, and in all. Raises UserError for a prompt that is empty, or has the landmark or ids
        outside the vocabulary.
        """
        sampling = sampling or Sampling()
        rows = [torch.as_tensor(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
        _check(rows, self.config)
        by_length = sorted(range(len(rows)), key=lambda n: len(rows[n]))
        groups = [list(same) for _, same in itertools.groupby(by_length, key=lambda n: len(rows[n]))]
        if memory is not None and not callable(memory) and len(groups) > 1:
            raise UserError("prompts of several lengths cannot continue one memory: pass a function for memories")
        device, generators = next(self.parameters()).device, [sampling.generator(n) for n in range(len(rows))]
        states: list[tuple[list[int], Callable[[Tensor], Tensor], Tensor]] = []
        read, total = 0, sum(map(len, rows))
        for group in groups:
            together = torch.stack([rows[n] for n in group])
            length = together.shape[1]
            group_memory = memory() if callable(memory) else memory
            if group_memory is None:
                group_memory = self.new_memory()
            if group_memory is None:
                group_memory = self.unlimited_memory(length + tokens)
            self.announce(group_memory, length + tokens)
            usual = {"landmark": DEFAULT_CHUNK, "transformer_xl": self.config.window or length}
            chunks = together.to(device).split(local or usual.get(self.config.kind, length), 1)
            for chunk in chunks:
                if chunk is chunks[-1]:
                    logits = self(chunk, memory=group_memory, last=True)
                    states.append((group, self.reading(group_memory), logits))
                else:
                    self.read_on(chunk, group_memory)
                read += chunk.numel()
                if progress is not None:
                    progress(read, total)
        ended = [False] * len(rows)
        for step in range(tokens):
            chosen: list[int | None] = [None] * len(rows)
            for number, (group, read_next, logits) in enumerate(states):
                if all(ended[n] for n in group):
                    continue
                scores = logits[:, -1]
                if self.config.landmark_id is not None:  # which is never predicted
                    scores = scores.clone()
                    scores[:, self.config.landmark_id] = -torch.inf
                drawn = [sampling.draw(row, generators[n]) for n, row in zip(group, scores, strict=True)]
                for n, token in zip(group, drawn, strict=True):
                    ended[n] = ended[n] or token in stop
                    chosen[n] = None if ended[n] else token
                if step + 1 < tokens and not all(ended[n] for n in group):
                    states[number] = group, read_next, read_next(torch.tensor(drawn, device=device)[:, None])
            if all(ended):
                return
            yield chosen


def summed_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of all weighted losses, in nats, and the number of targets, both on the device, without those of NO_LOSS.

    logits: (B, T, vocabulary). targets, weights: (B, T).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    reduction = "sum" if weights is None else "none"
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_LOSS, reduction=reduction)
    if weights is not None:
        loss = (loss * weights.flatten()).sum()
    return loss, (targets != NO_LOSS).sum()


def _check(prompts: list[Tensor], config: DecoderConfig) -> None:
    if not prompts:
        raise UserError("there is no prompt: give at least one")
    for number, prompt in enumerate(prompts):
        if prompt.ndim != 1 or len(prompt) == 0:
            raise UserError(f"prompt {number} is empty: give it at least one token")
        landmark = -1 if config.landmark_id is None else config.landmark_id
        refused = (prompt < 0) | (prompt >= config.vocab_size) | (prompt == landmark)
        if bool(refused.any()):
            at = int(refused.nonzero()[0])
            if prompt[at] != config.landmark_id:
                raise UserError(
                    f"prompt {number} has id {prompt[at]} at {at}, outside the vocabulary of {config.vocab_size} ids"
                )
            raise UserError(f"prompt {number} has the landmark's id {prompt[at]} at {at}: leave landmarks out")
