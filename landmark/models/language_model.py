"""The interface of all models: logits with a memory, losses of training windows, and generation."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.memory.text_memory import equal_pieces
from landmark.models.config import DecoderConfig
from landmark.models.sampling import Chooser, Sampling, decode_loop
from landmark.utils.constants import DEFAULT_CHUNK, NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch

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

    def token_forward(self, memory: Any) -> Callable[[Tensor], Tensor]:
        """How generated tokens (B, 1) are read with a memory that has read the prompts: returns logits (B, 1, V)."""
        return partial(self, memory=memory, last=True)

    def forward(self, tokens: Tensor, memory: Any = None, last: bool = False) -> Tensor:
        """Logits of the next token (B, T, vocabulary) after raw ids (B, T), or with `last` (B, 1, vocabulary)."""
        raise NotImplementedError

    def chunk(self, length: int) -> int:
        """Tokens of a text of this length that are usually read at a time."""
        usual = {"landmark": DEFAULT_CHUNK, "transformer_xl": self.config.window or length}
        return usual.get(self.config.kind, length)

    def read_text(
        self, tokens: Tensor, memory: Any, kept: int = 1, most: int | None = None
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Read more of texts of one length, piece by piece: after each the tokens read so far and their logits.

        tokens: raw ids (B, T). memory: cuts the text (None: nothing is kept between pieces). kept: last tokens that get
        logits; a piece with some gives (B, n, vocabulary), another None. most: tokens of a piece (None: `chunk`).
        """
        length, most = tokens.shape[1], most or self.chunk(tokens.shape[1])
        cut = equal_pieces if memory is None else partial(memory.pieces, kept=kept, device=tokens.device.type)
        for start, stop, _ in cut(length, most=lambda: most):
            wanted = max(0, min(stop - start, stop - length + kept))
            logits = self(tokens[:, start:stop], memory=memory, last=wanted <= 1)
            yield stop, logits[:, logits.shape[1] - wanted :] if wanted else None

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
        texts, before, total = list[Iterator[list[int | None]]](), 0, sum(map(len, rows))
        for group in groups:
            together = torch.stack([rows[n] for n in group]).to(next(self.parameters()).device)
            kept = self._memory_for(memory, together.shape[1] + tokens)
            for read, logits in self.read_text(together, kept, most=local):
                if logits is not None:
                    choose = [Chooser(sampling, rows[n].tolist(), n, self.config.landmark_id) for n in group]
                    texts.append(decode_loop(logits[:, -1], self._next_logits(kept), choose, tokens, stop))
                if progress is not None:
                    progress(before + read * len(group), total)
            before += together.numel()
        for step in itertools.zip_longest(*texts):
            chosen: list[int | None] = [None] * len(rows)
            for group, given in zip(groups, step, strict=True):
                for n, token in zip(group, given or ()):
                    chosen[n] = token
            yield chosen

    def _memory_for(self, memory: Any, tokens: int) -> Any:
        """The memory, or a new one, that is to read so many tokens. memory: as of `stream`."""
        memory = memory() if callable(memory) else memory
        memory = self.new_memory() if memory is None else memory
        return self.unlimited_memory(tokens) if memory is None else memory

    def _next_logits(self, memory: Any) -> Callable[[Tensor], Tensor]:
        """What reads a token of each text (B, 1), and returns the logits (B, V) after it."""
        forward = self.token_forward(memory)
        return lambda tokens: forward(tokens)[:, -1]


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
