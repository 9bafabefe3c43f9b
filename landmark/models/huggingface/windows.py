"""Windows with landmarks for fine-tuning with transformers' `Trainer`: a collator, and what is checked in a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from landmark.attention.layout import check_phase, insert_landmarks
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    from landmark.models.huggingface.families import Slides


class LandmarkCollator:
    """Makes batches for `transformers.Trainer` from tokenised documents without landmarks.

    Each document gets its landmarks, and is cut into windows of `length`; no text is lost. With ℓ = 3, L a landmark,
    and length = 6, the document a b c d e f g becomes::

        input_ids      a b c L d e     f L g        phase of the second window: 2
        labels         a b c - d e     f - g        as transformers has them, at their own places
        shift_labels   b c d - e f     g - -        the next token of the text; a landmark is neither target nor input

    Without `packed`, windows are rows, padded on the right (`attention_mask`). With `packed` they follow one another in
    one row without padding, and do not see each other (`cu_seqlens`, `position_ids`).

    The features of a document: `input_ids`; `labels` where some tokens have no loss (NO_LOSS = −100); `attention_mask`
    where some are padding, which is dropped.
    """

    def __init__(self, model: Any, length: int | None = None, packed: bool = False):
        """length: most tokens of a window, landmarks included; None: documents are not cut. Raises UserError for a
        model without landmarks, and for a length out of range.
        """
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not hasattr(bare, "landmarks"):
            raise UserError(f"{type(bare).__name__} has no landmarks: wrap it with landmark.models.huggingface.wrap")
        if bare.landmarks.token is None:
            raise UserError(f"{type(bare).__name__} reads without landmarks, so there are no windows with them")
        if length is not None and (not isinstance(length, int) or length < 2):
            raise UserError(f"length={length}: a window must have at least 2 tokens")
        self.token, self.block_size = bare.landmarks.token, bare.landmarks.block_size
        self.length, self.packed = length, packed

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """A batch of all windows of some documents. Raises UserError for a document that cannot be read."""
        windows = [window for feature in features for window in self._windows(feature)]
        phase = torch.tensor([window["phase"] for window in windows])
        if self.packed:
            lengths = torch.tensor([0, *(len(window["input_ids"]) for window in windows)])
            row = {name: torch.cat([window[name] for window in windows])[None] for name in _COLUMNS}
            positions = torch.cat([torch.arange(len(window["input_ids"])) for window in windows])[None]
            return {**row, "phase": phase, "cu_seqlens": lengths.cumsum(0), "position_ids": positions}
        pad = {"input_ids": 0, "labels": NO_LOSS, "shift_labels": NO_LOSS, "attention_mask": 0}
        for window in windows:
            window["attention_mask"] = torch.ones_like(window["input_ids"])
        batch = {
            name: torch.nn.utils.rnn.pad_sequence([window[name] for window in windows], True, value)
            for name, value in pad.items()
        }
        return {**batch, "phase": phase}

    def _windows(self, feature: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The windows of a document."""
        ids = torch.as_tensor(feature["input_ids"])
        labels = torch.as_tensor(feature.get("labels", ids)).clone()
        if ids.ndim == 1 and not len(ids):
            raise UserError("input_ids: the document has no text")
        if ids.ndim != 1 or ids.shape != labels.shape or ids.is_floating_point():
            raise UserError(
                f"input_ids {tuple(ids.shape)}, labels {tuple(labels.shape)}: a document is one row of integers, and "
                "its labels have its length"
            )
        if (mask := feature.get("attention_mask")) is not None:
            own = torch.as_tensor(mask).bool()
            ids, labels = ids[own], labels[own]
        if not len(ids):
            raise UserError("attention_mask: the document is nothing but padding")
        if bool((ids == self.token).any()):
            raise UserError(f"input_ids hold landmarks ({self.token}): leave them out, the collator inserts them")
        tokens, own = (x.squeeze(0) for x in insert_landmarks(ids[None], 0, self.block_size, self.token))
        in_view, targets = (torch.full_like(tokens, NO_LOSS) for _ in range(2))
        in_view[own] = labels.to(tokens.dtype)
        targets[own[:-1]] = labels[1:].to(tokens.dtype)
        step = self.length or len(tokens)
        return [
            {
                "input_ids": tokens[start : start + step],
                "labels": in_view[start : start + step],
                "shift_labels": targets[start : start + step],
                "phase": start % (self.block_size + 1),
            }
            for start in range(0, len(tokens), step)
        ]


_COLUMNS = "input_ids", "labels", "shift_labels"


def is_landmark(phase: Tensor, length: int, block_size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """The places of landmarks in windows, (B, length), bool. phase: (B,), tokens missing from the first block; with
    `cu_seqlens`, the bounds of documents packed into one row (documents + 1,), it is (documents,).
    """
    place = torch.arange(length, device=phase.device)
    if cu_seqlens is None:
        place = phase[:, None] + place
    else:
        bounds = cu_seqlens.to(phase.device)
        document = torch.bucketize(place, bounds[1:], right=True).clamp(max=len(phase) - 1)
        place = (phase[document] + place - bounds[document])[None]
    return place % (block_size + 1) == block_size


class Stream(NamedTuple):
    """Tokens of texts with landmarks, (B or 1, K) each. positions: in the text; a landmark has that of the token behind
    it. landmarks: bool, where they are. documents: their numbers, where several do not see each other (None: one).
    """

    positions: Tensor
    landmarks: Tensor
    documents: Tensor | None = None

    @staticmethod
    def of_windows(phase: Tensor, length: int, block_size: int, cu_seqlens: Tensor | None) -> Stream:
        """Whole windows of `length` tokens. phase, cu_seqlens: as of `is_landmark`."""
        landmarks = is_landmark(phase, length, block_size, cu_seqlens)
        before = (~landmarks).cumsum(1) - (~landmarks).long()
        if cu_seqlens is None:
            return Stream(before, landmarks)
        bounds = cu_seqlens.to(phase.device, non_blocking=True)
        documents = torch.bucketize(torch.arange(length, device=phase.device), bounds[1:], right=True)[None]
        return Stream(before - before[0, bounds[documents]], landmarks, documents)

    def seen(self, queries: int, slides: Slides) -> Tensor:
        """What the last of these tokens see in a layer with a sliding window, (B or 1, 1, queries, K), bool: the text
        that is near enough, and themselves. No other token sees a landmark there.
        """
        at = torch.arange(self.positions.shape[1], device=self.positions.device)
        before = at <= (own := at[-queries:, None])
        positions, mine = self.positions[:, None], self.positions[:, -queries:, None]
        near = mine // slides.size == positions // slides.size if slides.chunked else mine - positions < slides.size
        seen = before & near & ~self.landmarks[:, None]
        if self.documents is not None:
            seen &= self.documents[:, -queries:, None] == self.documents[:, None]
        return (seen | (at == own))[:, None]


def check_windows(given: Mapping[str, Any], phase: Tensor, bounds: Tensor | None, token: int, block_size: int) -> None:
    """Raise UserError for arguments that windows with landmarks do not allow. given: of the model's forward, with ids
    (B, T), whose landmarks (`token`) must stand where the phase says, or embeddings (B, T, D), and an attention mask
    (B, T), which may have padding on the right only.
    """
    mask, tokens = given["attention_mask"], given["inputs_embeds"]
    tokens = given["input_ids"] if tokens is None else tokens
    if tokens is None:
        raise UserError("phase: give the windows too, as input_ids")
    if given.get("past_key_values") is not None:
        raise UserError("windows with phase are whole: they go on from no past_key_values")
    if (given.get("labels") is None) != (given.get("shift_labels") is None):
        raise UserError(
            "labels and shift_labels: windows need both or none, as LandmarkCollator gives them; "
            "label smoothing would predict landmarks"
        )
    if not isinstance(phase, Tensor) or phase.is_floating_point() or phase.dtype == torch.bool:
        raise UserError(f"phase: must be a tensor of integers, not {getattr(phase, 'dtype', type(phase).__name__)}")
    try:
        check_phase(phase, len(tokens) if bounds is None else len(bounds) - 1, block_size)
    except ValueError as error:
        raise UserError(f"phase: {error}") from error
    if torch.compiler.is_compiling():
        return
    if mask is not None and (mask.ndim != 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
        raise UserError("attention_mask: windows with landmarks may have padding on the right only")
    if tokens.ndim != 2:
        return
    wrong = (tokens == token) != is_landmark(phase.to(tokens.device), tokens.shape[1], block_size, bounds)
    if mask is not None:
        wrong &= mask.to(wrong.device).bool()
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        found = "a landmark" if tokens[row, place] == token else "no landmark"
        raise UserError(
            f"phase: window {row} has {found} at token {place}, where its phase and block_size={block_size} say the "
            f"opposite: make the batches with landmark.models.huggingface.LandmarkCollator(model)"
        )
