"""Reading texts with a landmark memory, a few tokens at a time: of one length, or of several in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from landmark.attention import Scoring, Sinks
from landmark.attention.layout import insert_landmarks
from landmark.memory.text_memory import Piece, equal_pieces
from landmark.models.huggingface.landmark_cache import LandmarkCache
from landmark.models.huggingface.padded_batch import Group
from landmark.utils.errors import UserError


class Part(NamedTuple):
    """What texts of one length read next. rows: their numbers, (n,). ids: (n, T), without landmarks."""

    rows: Tensor
    ids: Tensor
    cache: LandmarkCache
    prefill: bool


class Together:
    """Attention of texts of several lengths in one pass of the model: each group of them with its own memory."""

    def __init__(self, parts: list[tuple[Tensor, int, LandmarkCache]]):
        """parts: numbers of the texts (n,), their tokens with landmarks, and their memory."""
        self.landmark_layers = parts[0][2].landmark_layers
        self._parts = parts

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """See `LandmarkWindow.attend`. Behind a text of fewer tokens is padding, for which the output is 0."""
        out = torch.zeros_like(q)
        for rows, length, cache in self._parts:
            rows = rows.to(q.device)  # of this layer
            own = q[rows, :, :length], k[rows, :, :length], v[rows, :, :length]
            out[rows, :, :length] = cache.attend(layer, *own, scoring, sinks)
        return out


class Step(NamedTuple):
    """What one step of a reading gives. tokens: of the longest text, read so far. logits, states: of each text, in its
    order, the logits (n, vocabulary) of its last tokens that get some, and of each layer its hidden states (n, D).
    """

    tokens: int
    logits: list[Tensor | None]
    states: list[list[Tensor]]


class ChunkedForward:
    """Reads texts with a `LandmarkModel` in the pieces that their memory cuts.

    forward: of the original model; kwargs: of it. most: tokens of a piece, asked before each. hidden: whether hidden
    states are returned.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        most: Callable[[], int],
        hidden: bool = False,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ):
        self._model, self._forward, self._settings = model, forward, model.landmarks
        self._most, self._hidden, self._kwargs = most, hidden, kwargs

    def steps(self, ids: Tensor, mask: Tensor, cache: LandmarkCache, kept: int) -> Iterator[Step]:
        """Read more of the texts of a batch: of each the same pieces as if it were alone.

        1. A step reads the next piece of each text.
        2. Texts that have read as many tokens so far, and read as many in the step, share a memory; without padding
           all do.
        3. In a step all texts pass through the model together, and attention is computed for each memory. Where layers
           keep a window or a state, one memory after the other passes through the model.

        ids: (B, T), without landmarks. mask: (B, T), bool, False for padding. kept: last columns that get logits.
        """
        texts = [row[own] for row, own in zip(ids, mask, strict=True)]
        for text in texts:
            self._check(text[None])
        wanted = mask[:, mask.shape[1] - kept :].sum(1).tolist()
        with_logits = [len(text) for text in texts] if self._hidden else wanted
        if any(len(text) > own for text, own in zip(texts, with_logits, strict=True)):
            cache.settle()
        unread = cache.unread(len(texts))
        texts = [torch.cat([before.to(text.device), text]) for before, text in zip(unread, texts, strict=True)]
        walks = [
            own.pieces(len(text), last, self._most)
            for own, text, last in zip(cache.caches(len(texts)), texts, with_logits, strict=True)
        ]
        alike, before = cache.padded is None and bool(mask.all()), max(map(len, unread))
        done = [0] * len(texts)
        while any(read < len(text) for read, text in zip(done, texts, strict=True)):
            ends = ((read, len(text)) for read, text in zip(done, texts, strict=True))
            now = [next(walk) if read < end else Piece(end, end, False) for walk, (read, end) in zip(walks, ends)]
            done = [piece.stop for piece in now]
            yield self._step(texts, now, wanted, cache, alike, max(0, max(done) - before))

    def _step(
        self, texts: list[Tensor], now: list[Piece], wanted: list[int], cache: LandmarkCache, alike: bool, tokens: int
    ) -> Step:
        """Read these pieces. wanted: last tokens of each text that get logits. tokens: of the step."""
        step = Step(tokens, [None] * len(texts), [[] for _ in texts])
        parts = self._parts(texts, now, cache, alike)
        for passed in [[part] for part in parts] if cache.has_others else [parts]:
            rows = [row for part in passed for row in part.rows.tolist()]
            skipped = max(0, min(len(texts[row]) - wanted[row] - now[row].start for row in rows))
            for part, (logits, layer_states) in zip(passed, self._pass(passed, cache, skipped), strict=True):
                for at, row in enumerate(part.rows.tolist()):
                    step.logits[row] = logits[at]
                    step.states[row] = [state[at] for state in layer_states]
        return step

    def read(self, ids: Tensor, mask: Tensor, cache: LandmarkCache, kept: int) -> CausalLMOutputWithPast:
        """All `steps`; logits (B, kept, vocabulary) and hidden states (B, T, D) of each layer, 0 for padding."""
        steps = list(self.steps(ids, mask, cache, kept))
        logits = [[step.logits[row] for step in steps if step.logits[row] is not None] for row in range(len(ids))]
        hidden = None
        if self._hidden:
            layers = range(len(next(states for states in steps[0].states if states)))
            hidden = tuple(
                padded(
                    mask, [[step.states[row][layer] for step in steps if step.states[row]] for row in range(len(ids))]
                )
                for layer in layers
            )
        found = padded(mask[:, -kept:], cast(list[list[Tensor]], logits))
        return CausalLMOutputWithPast(logits=found, past_key_values=cast(Any, cache), hidden_states=hidden)

    def _parts(self, texts: list[Tensor], pieces: list[Piece], cache: LandmarkCache, alike: bool) -> list[Part]:
        """What the texts read in these pieces, in groups that share a memory. alike: whether all do."""
        parts, kinds = [], [(piece.stop - piece.start, piece.prefill) for piece in pieces]
        for rows, own in [Group([*range(len(texts))], cache)] if alike else cache.divide(kinds):
            ids = torch.stack([texts[row][pieces[row].start : pieces[row].stop] for row in rows])
            if ids.numel():
                own.expect(max(len(texts[row]) - pieces[row].start for row in rows))
                parts.append(Part(torch.tensor(rows, device=ids.device), ids, own, pieces[rows[0]].prefill))
        return parts

    def _check(self, ids: Tensor) -> None:
        """Raise UserError for a text with landmarks."""
        token = self._settings.token
        if token is not None and ids.shape[1] > 1 and bool((ids == token).any()):
            raise UserError(f"the ids hold landmarks ({token}): leave them out, the model inserts them itself")

    def _placed(self, part: Part) -> tuple[Tensor, Tensor]:
        """The ids (n, T) as the model reads them, with landmarks if it has some, and where the text's own are."""
        token, block_size = self._settings.token, self._settings.block_size
        if token is None:
            return part.ids, torch.arange(part.ids.shape[1], device=part.ids.device)
        return insert_landmarks(part.ids, part.cache.memory.position, block_size, token)

    def _pass(self, parts: list[Part], cache: LandmarkCache, skipped: int) -> list[tuple[Tensor, list[Tensor]]]:
        """One pass of the model over the next tokens of texts; several parts only where no layer keeps anything else.

        cache: of the whole batch. skipped: first tokens that get no logits. Returns for each part logits
        (n, T − skipped, vocabulary), and hidden states (n, T, D) of each layer.
        """
        placed = [self._placed(part) for part in parts]
        wanted = placed[0][1][skipped:]
        if len(parts) > 1:
            wanted = torch.cat([at[skipped:] for _, at in placed]).unique()
        with ExitStack() as stack:
            at_places = [
                stack.enter_context(part.cache.reading_chunk(part.ids, own.shape[1], own.device, part.prefill))
                for part, (own, _) in zip(parts, placed, strict=True)
            ]
            tokens, positions, past = placed[0][0], at_places[0], parts[0].cache
            landmarks: LandmarkCache | Together = past
            if len(parts) > 1:
                length = max(own.shape[1] for own, _ in placed)
                tokens, past = tokens.new_full((cache.batch_size, length), self._settings.token or 0), cache
                positions = tokens.new_zeros(cache.batch_size, length)
                for part, (own, _), each in zip(parts, placed, at_places, strict=True):
                    tokens[part.rows, : own.shape[1]] = own
                    positions[part.rows, : own.shape[1]] = each
                stack.enter_context(cache.passing_together(positions))
                spans = [(part.rows, own.shape[1], part.cache) for part, (own, _) in zip(parts, placed, strict=True)]
                landmarks = Together(spans)
            outputs = self._forward(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=past,
                use_cache=True,
                logits_to_keep=wanted,
                landmarks=landmarks,
                output_hidden_states=self._hidden,
                **self._kwargs,
            )
        states = outputs.hidden_states if self._hidden else ()
        found = []
        for part, (_, at) in zip(parts, placed, strict=True):
            rows = part.rows if len(parts) > 1 else None
            chosen = torch.searchsorted(wanted, at[skipped:])
            found.append((_part_of(outputs.logits, rows, chosen), [_part_of(state, rows, at) for state in states]))
        return found


def read_text(
    model: Any, ids: Tensor, cache: Any, kept: int = 1, most: Callable[[], int] | None = None
) -> Iterator[tuple[int, Tensor | None]]:
    """`LandmarkModel.read_text` of any causal language model of transformers, `most` tokens at a time (None: all)."""
    if isinstance(cache, LandmarkCache):
        yield from model.read_text(ids, cache, kept, most)
        return
    for start, stop, _ in equal_pieces(length := ids.shape[1], most or (lambda: length)):
        wanted = max(0, min(stop - start, stop - length + kept))
        given = {"past_key_values": cache, "use_cache": True, "logits_to_keep": wanted or 1}
        logits = model(ids[:, start:stop], **given).logits
        yield stop, logits if wanted else None


def _part_of(batch: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Some columns of some rows (None: all) of outputs (B, T, …), which may be on another device."""
    batch = batch if rows is None else batch[rows.to(batch.device)]
    return batch[:, columns.to(batch.device)]


def last_columns(mask: Tensor, columns: int) -> Tensor:
    """The columns of an attention mask (B, T or more) that belong to the last tokens. Raises UserError if too short."""
    if mask.ndim != 2 or mask.shape[1] < columns:
        raise UserError(f"attention_mask: must be (batch, {columns} or more) of 0 and 1, not {tuple(mask.shape)}")
    return mask[:, -columns:]


def check_ends(mask: Tensor, kept: int) -> None:
    """Raise UserError where the mask (B, T) has no text, or none of a text in its last `kept` columns."""
    if not bool(mask.any()):
        raise UserError("attention_mask: nothing but padding, so there is no text to read")
    if kept and (without := (~mask[:, -kept:].bool().any(1)).nonzero().flatten().tolist()):
        raise UserError(
            f"attention_mask: text {without[0]} ends with padding, so nothing follows its last {kept} columns: pad on "
            "the left (tokenizer.padding_side='left')"
        )


def check_positions(position_ids: Tensor | None, mask: Tensor, cache: LandmarkCache) -> None:
    """Raise UserError if the positions are not those of the text: a memory can give no others."""
    if position_ids is None:
        return
    before = torch.tensor([len(text) for text in cache.texts(len(mask))], device=mask.device)
    own = mask.long().cumsum(-1) - 1 + before[:, None]
    given = position_ids[..., -mask.shape[1] :].expand_as(mask) if position_ids.ndim == 2 else None
    if given is None or not torch.equal(given * mask, own.to(given.device) * mask):
        raise UserError("position_ids: a landmark memory counts the text's own tokens 0, 1, 2, …; leave them out")


def check_goes_on(ids: Tensor, mask: Tensor | None, cache: LandmarkCache) -> None:
    """Raise UserError unless the ids (B, T) repeat what a memory has read and go on. mask: (B, T), None: no padding."""
    columns = cache.get_seq_length()
    if not columns:
        return
    if len(ids) != cache.batch_size:
        raise UserError(f"the ids are of {len(ids)} texts, the memory is of {cache.batch_size}")
    own = torch.ones_like(ids, dtype=torch.bool) if mask is None else last_columns(mask, ids.shape[1]).bool()
    whole = "give generate the whole text, as torch.cat([memory.ids, new_ids], 1)"
    for number, (row, has, read) in enumerate(zip(ids, own, cache.texts(len(ids)), strict=True)):
        given, read = row[:columns][has[:columns]], read.to(ids.device)
        same = min(len(given), len(read))
        if other := (given[:same] != read[:same]).nonzero().flatten().tolist():
            raise UserError(
                f"past_key_values: the memory has read {len(read)} tokens, and text {number} differs from them at "
                f"token {other[0]} ({int(given[other[0]])}, read was {int(read[other[0]])}); an answer that was "
                f"decoded may have other ids: {whole}"
            )
        if len(given) != len(read) or ids.shape[1] <= columns:
            raise UserError(
                f"past_key_values: the memory has read {len(read)} tokens, and text {number} has nothing behind them: "
                f"{whole}"
            )


def padded(mask: Tensor, found: list[list[Tensor]]) -> Tensor:
    """Outputs (B, columns, …), 0 for padding. mask: (B, columns), bool, which of the last columns are text. found: the
    outputs of each text in pieces (n, …), to its end, perhaps of tokens before these columns too.
    """
    like = next(piece for pieces in found for piece in pieces)
    out = like.new_zeros(*mask.shape, *like.shape[1:])
    for row, (own, pieces) in enumerate(zip(mask, found, strict=True)):
        columns = own.nonzero().flatten().to(out.device)
        for piece in reversed(pieces):
            piece = piece[max(0, len(piece) - len(columns)) :]
            out[row, columns[len(columns) - len(piece) :]] = piece
            columns = columns[: len(columns) - len(piece)]
    return out
