"""Masked language modelling in both directions (paper, Appendix F): 15 % of the tokens are hidden, and predicted.

Every hidden token becomes the mask, in training as in evaluation. BERT leaves a tenth of them as they are and draws
another tenth at random, so that a model that is tuned without masks has seen text without them; here none is.
Landmarks L and end of text E are never hidden. With masks M, and - where there is no loss::

    window          b c L d e E L f g
    tokens          b M L d e E L M g
    targets         - c - - - - - f -
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention import ContextMiss
from landmark.attention.layout import AttentionInputs, check_phase
from landmark.attention.reference import landmark_attention_weights
from landmark.experiment.config import SYNTHETIC, Config
from landmark.experiment.data.evaluation_texts import segments
from landmark.experiment.data.random_numbers import random_numbers
from landmark.experiment.data.stream import Stream
from landmark.experiment.data.tokenizers import Tokenizer
from landmark.experiment.evaluation.measurement import Measurement, Progress, SegmentLosses, inference, token_losses
from landmark.models import LanguageModel
from landmark.models.config import DecoderConfig
from landmark.models.decoder import Decoder, WindowInputs
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch

SETTINGS = ("model.masked",)
MASKS = 6  # a stream of random numbers of its own, beside those of `landmark.experiment.data.random_numbers`
SHARE = 0.15
_VALIDATION, _TEXT = 2**64 - 1, 2**64 - 2  # used instead of a step
_DRAWN = 4096  # tokens of a text whose random numbers are drawn together


def check(config: Config) -> None:
    """Raise UserError for settings that have no effect on a model that reads whole texts of a corpus, and no memory."""
    check_model(config.model.kind, config.cmt.enabled, config.model.backend)
    unmasked_text = ("data.tasks", config.data.tasks), ("data.passkeys", config.data.passkeys)
    measured = [("eval.task", config.eval.task)]
    chunks = [("eval.local", resolved(config).eval.local != config.eval.length)]
    kept = [
        (f"{group}.{item.name}", value != item.default and value)
        for group in ("memory", "retrieval")
        for item in fields(getattr(config, group))
        if (value := getattr(getattr(config, group), item.name)) is not None and item.name != "k"
    ]
    for key, value in (*unmasked_text, *measured, *chunks, *kept):
        if value:
            raise UserError(f"{key}: has no effect on model.masked=true, which reads whole texts, without a memory")
    if config.data.name in SYNTHETIC or config.task in ("generate", "inspect"):
        raise UserError(f"model.masked=true: is for text of a corpus, not data={config.data.name} task={config.task}")
    if config.model.kind == "landmark" and config.retrieval.k < 1:
        raise UserError(f"retrieval.k={config.retrieval.k}: must be at least 1 for a masked model")


def check_model(kind: str, cmt: bool, backend: str) -> None:
    """Raise UserError for a kind of model, a context miss token or a backend that reads in one direction."""
    if kind == "transformer_xl" or cmt or backend == "triton":
        raise UserError(f"model.masked=true: model={kind}, cmt={cmt}, model.backend={backend} read in one direction")


def resolved(config: Config) -> Config:
    """A text is read at once."""
    if config.eval.local is not None:
        return config
    return replace(config, eval=replace(config.eval, local=config.eval.length))


def row_settings(config: Config) -> dict[str, Any]:
    """The part of a row's identity."""
    return {"masked": True}


def keys_per_query(length: int) -> float:
    """A query attends in both directions."""
    return length


@dataclass(frozen=True)
class MaskedTokens:
    """The hidden tokens of windows and texts. mask: id that hides a token. kept: ids that are never hidden."""

    mask: int
    kept: Sequence[int]

    def for_step(self, batch: WindowBatch, seed: int, step: int, indices: range) -> WindowBatch:
        """Some windows of a step with hidden tokens, and those as targets, as a function of seed, step and index."""
        return self._hide(batch, random_numbers(seed, step, MASKS, indices, (batch.tokens.shape[1],)))

    def for_validation(self, batch: WindowBatch, windows: Sequence[int] | np.ndarray) -> WindowBatch:
        """The same for validation windows, as a function of each window's number."""
        shape = (batch.tokens.shape[1],)
        drawn = [random_numbers(int(window), _VALIDATION, MASKS, range(1), shape) for window in windows]
        return self._hide(batch, np.concatenate(drawn))

    def mask_text(self, tokens: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Raw ids (B, L) with masks, and which are hidden, by their places in a stream. starts: (B,), of rows."""
        hidden = self._drawn_below(np.stack([_numbers_at(start, tokens.shape[1]) for start in starts]), tokens)
        return tokens.masked_fill(hidden, self.mask), hidden

    def _hide(self, batch: WindowBatch, drawn: np.ndarray) -> WindowBatch:
        hidden = self._drawn_below(drawn, batch.tokens)
        tokens, targets = batch.tokens.masked_fill(hidden, self.mask), batch.tokens.masked_fill(~hidden, NO_LOSS)
        return replace(batch, tokens=tokens, targets=targets)

    def _drawn_below(self, drawn: np.ndarray, tokens: Tensor) -> Tensor:
        hidden = torch.from_numpy(drawn < np.uint64(SHARE * 2.0**64)).to(tokens.device)
        return hidden & ~torch.isin(tokens, torch.tensor(list(self.kept), device=tokens.device))


def masked_tokens(tokenizer: Tokenizer) -> MaskedTokens:
    """The mask is the id after the landmark. Raises UserError where that is not unused."""
    mask = tokenizer.landmark + 1
    if mask >= tokenizer.vocab_size or tokenizer.byte_lengths[mask] or mask == tokenizer.eot:
        raise UserError(f"tokenizer={tokenizer.name}: has no unused id for the mask, choose gpt2, code or bytes")
    return MaskedTokens(mask, (tokenizer.landmark, tokenizer.eot))


def _numbers_at(start: int, length: int) -> np.ndarray:
    """Random numbers of the places start … start+length−1 of a stream, uint64 (length,)."""
    first, last = start // _DRAWN, (start + length - 1) // _DRAWN
    drawn = [random_numbers(part, _TEXT, MASKS, range(1), (_DRAWN,))[0] for part in range(first, last + 1)]
    return np.concatenate(drawn)[start - first * _DRAWN :][:length]


def window_data(config: Config, tokenizer: Tokenizer) -> MaskedTokens:
    """Training and validation windows with hidden tokens."""
    return masked_tokens(tokenizer)


def landmark_attention_both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size: int,
    phase: Tensor | None = None,
    *,
    alpha: float = 0.0,
    top_k: int | None = None,
) -> Tensor:
    """Landmark attention to earlier and later blocks, (B, H, T, d), as `landmark_attention`: a query attends to its own
    block, and to others by their landmarks' gates. A last block without its landmark is seen by its own tokens alone.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    phase, scale = check_phase(phase, len(q), block_size, q.device), 1 / math.sqrt(q.shape[-1])
    inputs = AttentionInputs(q, k, v, None, phase, None, None, block_size, 0, scale, alpha=alpha)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    return landmark_attention_weights(scores, inputs, causal=False, top_k=top_k)[0].to(v.dtype) @ v


class Model(Decoder):
    """Reads whole texts, and predicts hidden tokens: its logits are of each token itself, not of the next one."""

    def __init__(self, config: DecoderConfig):
        """Raises UserError for a model that reads in one direction."""
        check_model(config.kind, config.cmt, config.backend)
        super().__init__(config)
        self.retrieved: int | None = None  # other blocks that a query attends to; None: all

    def attend_in_window(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: WindowInputs, extra: ContextMiss | None
    ) -> Tensor:
        """Attention in both directions."""
        if window.layout is None:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])
        block_size, phase = window.layout.block_size, window.layout.phase
        return landmark_attention_both_ways(q, k, v, block_size, phase, alpha=self.config.alpha, top_k=self.retrieved)

    def new_memory(self, **settings) -> NoReturn:
        """Raises UserError: there is none."""
        raise UserError("model.masked=true: the model reads whole texts, it has no memory and continues no text")

    def unlimited_memory(self, tokens: int) -> NoReturn:
        """Raises UserError: there is none."""
        self.new_memory()


def evaluate(
    model: LanguageModel, stream: Stream, tokenizer: Tokenizer, config: Config, progress: Progress | None = None
) -> dict[str, Any]:
    """Masked perplexity of one row. The same tokens are hidden for every model, and at every length.

    The whole text is read at once, layer by layer. A query of a landmark model attends to its own block and to the k
    others, earlier or later, whose landmarks have the highest scores. Returns the entries of `SegmentLosses`, of hidden
    tokens, and of `Measurement`. Raises UserError if the settings do not fit the split or the model.
    """
    settings, measured = config.eval, Measurement(model, config, progress)
    cut = segments(len(stream), settings.length, settings.tokens, settings.span)
    masks = masked_tokens(tokenizer)
    assert isinstance(model, Model)
    model.retrieved = config.retrieval.k if model.config.kind == "landmark" else None
    counted = SegmentLosses(settings.length)
    for numbers in measured.batches([segment.length for segment in cut]):
        batch = [cut[number] for number in numbers]
        raw = np.stack([stream.tokens[s.start : s.start + s.length] for s in batch]).astype(np.int64)
        tokens = torch.from_numpy(raw).to(measured.device)
        shown, hidden = masks.mask_text(tokens, [segment.start for segment in batch])
        with inference(model, config):
            logits = model(shown)
            losses = token_losses(logits, tokens)
        for segment, loss, is_hidden in zip(batch, losses.cpu().numpy(), hidden.cpu().numpy(), strict=True):
            places = np.arange(segment.length - segment.counted, segment.length)
            counted.add(segment.start + segment.length - segment.counted, loss, places[is_hidden[places]])
    return counted.entries() | measured.entries(measured.done, attended=_attended(config))


def _attended(config: Config) -> tuple[float, float]:
    """Keys of normal tokens that a query attends to, and landmarks that it scores."""
    length, block = config.eval.length, config.model.block_size
    if config.model.kind != "landmark" or not block:
        return length, 0.0
    return min(length, (1 + config.retrieval.k) * block), max(0, length // block - 1)
