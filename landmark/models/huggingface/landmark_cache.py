"""The cache of a model with landmarks: a memory for layers with full attention; others keep a window or a state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
)

from landmark.attention import Scoring, Sinks
from landmark.attention.keys import Keys
from landmark.attention.layout import insert_landmarks, text_positions
from landmark.memory.blocks.cache import BlockCache
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.memory import memory_of
from landmark.memory.landmarks.settings import MemorySettings
from landmark.memory.retrievals import Observer
from landmark.memory.saving import REMEDY
from landmark.memory.text_memory import Piece, TextMemory
from landmark.models.huggingface.attention import check_attended
from landmark.models.huggingface.cache_layers import (
    Chunk,
    MemoryLayer,
    TextWindowLayer,
    content_of,
    copied,
    fill,
    following,
    new_layers,
)
from landmark.models.huggingface.families import (
    Slides,
    cache_layers,
    device_of_layer,
    inverse_frequencies,
    landmark_layers,
    memory_frequencies,
    rotation_of,
    shared_key_layers,
    sliding_frequencies,
    softcap_of,
    text_config,
    unrotate,
    unrotated_layers,
)
from landmark.models.huggingface.padded_batch import Group, PaddedBatch
from landmark.models.huggingface.tiny import halved
from landmark.models.huggingface.windows import Stream
from landmark.utils.errors import UserError
from landmark.utils.files import open_written
from landmark.utils.weights import weights_digest, weights_state

WINDOWS = "windows.safetensors"  # beside a saved memory: ids, and the windows and states of other layers
IDS = "ids"
SETTLED = "settled."  # of the other layers where the memory is settled, if that is before its end
MARKS = 16  # most marks of a text


class LandmarkCache(Cache):
    """Past keys and values of a text that a model reads with landmarks; a `landmark.memory.Memory` holds them.

    To transformers, its length is the number of the text's own tokens, without landmarks. For each chunk, inside
    `reading`, the model calls `attend` in each layer with full attention, which undoes the rotation where the memory
    assigns positions itself; at the end the chunk's blocks are stored. If a layer fails, nothing of the chunk is kept.
    In a `padded` batch the texts have caches of their own; `memory` is then empty.

    ids: (B, n), the text so far, without landmarks; empty in a padded batch. Those behind the tokens that the memory
    has read are *unread*: the next call reads them too (`settle`). marks: places at which `fork` can begin, the ends of
    whole chunks; None: none are made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_size: int,
        settings: MemorySettings | BlockCacheSettings,
        observer: Observer | None = None,
        landmark_positions: bool = False,
    ):
        """An empty cache of a model. settings: of a text with landmarks, or without. landmark_positions: as of
        `LandmarkSettings`.
        """
        self._kinds, self._shared_keys = cache_layers(model), shared_key_layers(model)
        self._slides, self._block_size = Slides.of(text_config(model)), block_size
        self._with_landmarks = isinstance(settings, MemorySettings)
        self._width = block_size + 1 if self._with_landmarks and not landmark_positions else None
        self._chunk = Chunk()
        super().__init__(layers=self._new_layers())
        alone = MemoryLayer, DummyLayer
        self._numbers_of_others = [n for n, layer in enumerate(self.layers) if type(layer) not in alone]
        self.landmark_layers, self._unrotated = landmark_layers(model), unrotated_layers(model)
        self.frequencies, self._rotation = inverse_frequencies(model), rotation_of(model)
        self.memory = self._new_memory(model, block_size, settings, observer)
        self._local = getattr(getattr(model, "landmarks", None), "local", 0)
        self._be_of(model)
        self.marks: list[Mark] | None = None
        self._state: int | None = None  # of the weights that have read it; None: those are that read next
        self.next_token: Any = None  # a `landmark.models.huggingface.next_token.NextToken`, once it has read a token
        self._forget()

    def _be_of(self, model: PreTrainedModel) -> None:
        self._model = _ModelRef(model)
        self.memory.model = self._model.digest

    def _new_memory(
        self,
        model: PreTrainedModel,
        block_size: int,
        settings: MemorySettings | BlockCacheSettings,
        observer: Observer | None,
    ) -> TextMemory:
        """A memory of a text with landmarks, or without."""
        if isinstance(settings, MemorySettings):
            keys = Keys(0.0, "token", memory_frequencies(model), self._unrotated, self._width)
            scoring = Scoring(softcap=softcap_of(model))
            return memory_of(block_size, settings, keys=keys, scoring=scoring, observer=observer)
        memory = BlockCache(
            block_size,
            **vars(settings),
            positions=getattr(text_config(model), "max_position_embeddings", None),
            frequencies=self.frequencies,
            unrotated_layers=self._unrotated,
            observer=observer,
        )
        memory.scorer.check_model(lambda: weights_digest(model), block_size)
        return memory

    def _new_layers(self) -> list[Any]:
        return new_layers(self._kinds, self._chunk, self._with_landmarks)

    def _copy(self, memory: TextMemory) -> LandmarkCache:
        """A copy with another memory, whose other layers have read nothing."""
        other = copy.copy(self)
        other._chunk, other.memory, other.next_token = Chunk(), memory, None
        other.layers = other._new_layers()
        return other

    def empty(self) -> LandmarkCache:
        """A memory with the same settings that has read nothing."""
        empty = self._copy(copy.copy(self.memory))
        empty.reset()
        return empty

    def _forget(self) -> None:
        self.ids = torch.zeros(0, 0, dtype=torch.int64)
        self._settled: tuple[int, dict[int, Any]] = (0, {})  # a position, and copies of the other layers there
        self.padded: PaddedBatch | None = None
        self.marks = None if self.marks is None else []
        self.torn = False  # whether an error left a text read in part

    def expect(self, tokens: int) -> None:
        """Get ready to read so many tokens more; a text that is read in parts may be announced as a whole."""
        self.memory.expect(tokens)

    @property
    def stats(self) -> dict[str, Any]:
        """See `landmark.memory.Memory.stats`; a padded batch has those of its groups alone."""
        return self.memory.stats

    def pieces(self, length: int, kept: int, most: Callable[[], int]) -> Iterator[Piece]:
        """Where the memory cuts the next `length` tokens of the text, of which the last `kept` get logits."""
        return self.memory.pieces(length, kept, most, cast(PreTrainedModel, self._model()).device.type)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each text ends that was read alone (`joined`), in tokens; (): the text is one."""
        return self.memory.ends

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each text that was read alone."""
        return (0, *self.ends[:-1])

    @property
    def settled(self) -> int:
        """Tokens that `settle` leaves as they are read."""
        memory = self.memory
        if memory.settled == memory.position:
            return memory.tokens_read
        return self._settled[0] if self.has_others else memory.settled

    def settle(self) -> None:
        """Let what is read depend on the text alone: later tokens become unread, as those of an answer.

        Tokens that chose their blocks together with others, which are no part of the text that follows, would let its
        answers depend on a text that was read before. Tokens that chose alone are read again with what now follows.
        """
        for group in self.padded.groups if self.padded else ():
            group.cache.settle()
        memory = self.memory
        if memory.settled == memory.position:
            return
        (at, others), new = self._settled, self._new_layers()
        self._put({n: copied(others[n]) if n in others else new[n] for n in self._numbers_of_others})
        memory.settle(at if self.has_others else None)

    def takes_guesses(self, tokens: int) -> bool:
        """Whether so many tokens may be read that are guesses, and can be taken back."""
        if self.has_others or self.padded:
            return False
        return self.memory.takes_guesses(tokens, cast(PreTrainedModel, self._model()).device.type)

    def forget(self, tokens: int) -> None:
        """Take back the last tokens, which were guesses (`takes_guesses`)."""
        if tokens:
            self.memory.forget(tokens)
            self.ids = self.ids[:, :-tokens]
            self.marks = self.marks and [mark for mark in self.marks if mark.tokens <= self.ids.shape[1]]

    def unread(self, batch: int) -> list[Tensor]:
        """The unread ids of each of `batch` texts."""
        return [own[each.memory.tokens_read :] for own, each in zip(self.texts(batch), self.caches(batch), strict=True)]

    def caches(self, batch: int) -> list[LandmarkCache]:
        """The cache of each of `batch` texts."""
        return self.padded.caches() if self.padded else [self] * batch

    @property
    def has_others(self) -> bool:
        """Whether some layers keep a sliding window or a recurrent state, which cannot be cut back as a memory can."""
        return bool(self._numbers_of_others)

    @property
    def _others(self) -> dict[int, Any]:
        return {number: self.layers[number] for number in self._numbers_of_others}

    def _copies_of_others(self) -> dict[int, Any]:
        return {number: copied(layer) for number, layer in self._others.items()}

    @contextmanager
    def reading_chunk(self, ids: Tensor, length: int, device: torch.device, prefill: bool = False) -> Iterator[Tensor]:
        """Read a chunk of `length` tokens, landmarks included. ids: (B, n), without them. prefill: none of its logits
        is wanted, so its tokens may choose blocks together. Gives its position ids (1, length), all 0 where the memory
        assigns positions and no layer keeps anything else: undoing the rotation is exact. Raises UserError if a layer
        did not attend with landmarks.
        """
        positions = torch.zeros(1, length, dtype=torch.int64, device=device)
        self.memory.begin(prefill)
        stream = torch.arange(self.memory.position, self.memory.position + length, device=device)
        if self.has_others or self.memory.is_rotated:
            positions = positions + (stream if self._width is None else text_positions(stream, self._width))
        if self._with_landmarks and self.has_others:
            _, self._chunk.text = insert_landmarks(ids, self.memory.position, self._block_size, 0)
        self._chunk.seen = None
        before = self._copies_of_others()
        self._chunk.positions = positions
        self._chunk.attended.clear()
        try:
            yield positions
            check_attended(self.landmark_layers, self._chunk.attended)
        except BaseException:
            self.memory.discard()
            self._put(before)
            raise
        finally:
            self._chunk.positions = None
        self.memory.commit()
        if (new := self.memory.tokens_read - self.ids.shape[1]) > 0:
            self.ids = torch.cat([self.ids.to(ids.device), ids[:, -new:]], 1) if self.ids.numel() else ids
        if self.has_others and self.memory.settled == self.memory.position:
            self._settled = self.memory.position, self._copies_of_others()
        if self.memory.is_end(ids.shape[1], self._local):
            self.add_mark()

    def seen_in_window(self, queries: int, keys: int) -> Tensor | None:
        """See `LandmarkWindow.seen_in_window`; None: what transformers' mask says."""
        if (text := self._chunk.text) is None or len(text) == queries:  # the chunk has no landmark
            return None
        if self._chunk.seen is None:
            assert self._slides is not None
            phase = torch.full((1,), self.memory.position % (self._block_size + 1), device=text.device)
            own = Stream.of_windows(phase, queries, self._block_size, None)
            before = torch.arange(queries - keys, 0, device=text.device)[None]
            positions = self.memory.tokens_read + torch.cat([before, own.positions], 1)
            landmarks = torch.cat([torch.zeros_like(before, dtype=torch.bool), own.landmarks], 1)
            self._chunk.seen = Stream(positions, landmarks).seen(queries, self._slides)
        return self._chunk.seen

    @property
    def text_of_chunk(self) -> Tensor | None:
        """The places of the text among the tokens of the chunk, where it has landmarks."""
        return self._chunk.text

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """Attend to the chunk and to the memory; see `LandmarkWindow.attend`."""
        assert self._chunk.positions is not None  # or `MemoryLayer.update` had raised
        self._chunk.attended.add(layer)
        if not self.memory.is_rotated and layer not in self._unrotated:
            positions = self._chunk.positions.to(q.device) if self.has_others else None
            q, k = (unrotate(x, positions, self.frequencies) for x in (q, k))
        if (scale := self._rotation.scales.get(layer)) is not None:  # scores are the same, and keys can be rotated
            weight = cast(PreTrainedModel, self._model()).get_parameter(scale)
            q, k = q * weight, k / weight
        if self._rotation.neighbours:  # scores are the same in any order of channels
            q, k = (halved(x, len(self.frequencies)) for x in (q, k))
        channels = v.shape[-1]
        if channels < k.shape[-1]:
            v = nn.functional.pad(v, (0, k.shape[-1] - channels))
        # A layer that reads another's keys has been given the chunk's, which are written to the same place once more.
        return self.memory.attend_in(self._shared_keys.get(layer, layer), q, k, v, scoring, sinks)[..., :channels]

    def _put(self, others: Mapping[int, Any]) -> None:
        for number, layer in others.items():
            self.layers[number] = layer
            if isinstance(layer, MemoryLayer | TextWindowLayer):
                layer._chunk = self._chunk

    @property
    def num_stored(self) -> int:
        """Layers whose keys the memory has, once a text is read."""
        return len(self.landmark_layers - set(self._shared_keys))

    def took_token(self) -> None:
        """Inside `reading_chunk`: note that all layers have attended, as a CUDA graph cannot."""
        self._chunk.attended.update(self.landmark_layers)

    def reset(self) -> None:
        """Forget everything: a new text begins."""
        self.layers = self._new_layers()
        self.memory.reset()
        self._state = self.next_token = None
        self._forget()

    def save(self, folder: Path | str, others: Mapping[str, bytes] | None = None) -> None:
        """Write everything to a new folder, which a cache of the same model, on any tier, can `load`. others: further
        files by name. Raises UserError, and leaves nothing, where the folder exists, the disk is full, or the batch is
        padded.
        """
        if self.padded:
            raise UserError("a padded batch has a memory for each length: read the texts one by one to save them")
        tensors = {IDS: self.ids.contiguous()}
        at, settled = self._settled
        behind = settled if at < self.memory.position else {}  # the end's own are those that are settled
        for prefix, layers in (("", self._others), (SETTLED, behind)):
            for number, layer in layers.items():
                tensors |= {f"{prefix}{number}.{name}": x.contiguous() for name, x in content_of(layer).items()}
        self.memory.save(folder, {WINDOWS: save_tensors(tensors), **(others or {})})

    def load(self, folder: Path | str | Sequence[Path | str]) -> None:
        """Replace the content by that of a saved cache, or of several, `joined`. Raises UserError as `Memory.load` and
        `append` do, for a model with other weights too, and where the ids, windows or states are missing; then the
        content stays as it was.
        """
        folders = [folder] if isinstance(folder, (str, Path)) else folder
        saved = (self._loaded(Path(each)) for each in folders)
        self._become(next(saved) if len(folders) == 1 else joined(saved))

    def _loaded(self, folder: Path) -> LandmarkCache:
        loaded = self._copy(copy.copy(self.memory))
        loaded._load(folder)
        return loaded

    def _load(self, folder: Path) -> None:
        device_of = partial(device_of_layer, cast(PreTrainedModel, self._model()))
        self.memory.load(folder, device_of)  # checks the hashes of all files
        tensors = saved_windows(folder)
        self._forget()
        self._state = weights_state(cast(PreTrainedModel, self._model()))
        self.ids = tensors[IDS]
        is_settled = self.memory.settled == self.memory.position
        more = self.ids.shape[-1] - self.memory.tokens_read  # unread, behind what is settled
        if self.ids.ndim != 2 or self.ids.dtype != torch.int64 or more < 0 or (more and not is_settled):
            raise UserError(f"{folder}/{WINDOWS} is damaged, its ids are not those of the text that was read: {REMEDY}")
        new = self._new_layers()
        settled = {number: new[number] for number in self._numbers_of_others}
        for prefix, others in (("", self._others), (SETTLED, settled)):
            for number, layer in others.items():
                start = f"{prefix}{number}."
                own = {name[len(start) :]: x for name, x in tensors.items() if name.startswith(start)}
                try:
                    fill(layer, own, device_of(number))
                except torch.OutOfMemoryError:
                    raise
                except (LookupError, RuntimeError, ValueError) as error:
                    raise UserError(f"{folder}/{WINDOWS} is damaged in layer {number} ({error}): {REMEDY}") from error
        self._settled = self.memory.settled, self._copies_of_others() if is_settled else settled

    def append(self, other: LandmarkCache) -> None:
        """Let a text follow that another memory of the model has read alone, as `BlockCache.append`. A sliding window
        has the last tokens of both. Raises UserError for a memory that cannot follow; then nothing has changed.
        """
        model, memory = cast(PreTrainedModel, self._model()), self.memory
        turned = {number: sliding_frequencies(model, number) for number in self._numbers_of_others}
        if other.padded or other.torn or other.batch_size != 1 or self.batch_size > 1:
            raise UserError("several memories: each must have read one text, to its end")
        if self.ids.shape[1] > memory.tokens_read:
            raise UserError("several memories: the end of one must be read again (settle) before another text follows")
        if not other.fits(model, weights_state(model)):
            raise UserError("several memories: they are of different models, or the weights have changed: read again")
        (at, settled), start, windows = other._settled, memory.position, self._others
        memory.append(other.memory, at if self.has_others else None)  # windows are cut at no other place
        moved, settled = (
            {n: following(windows[n], layers.get(n), start, turned[n]) for n in self._numbers_of_others}
            for layers in (other._others, settled)
        )
        self.ids = torch.cat([self.ids, other.ids], 1) if start else other.ids
        self._put(moved)
        self._settled, self._state = (start + at, settled), other._state

    def fits(self, model: Any, state: int) -> bool:
        """Whether the memory is this model's, and its weights and adapters are those with which it began. state: their
        `weights_state`.
        """
        return self._model() is model and self._state in (None, state)

    def check_model(self, model: Any, is_token: bool = False) -> None:
        """Raise UserError where the memory does not fit. is_token: one token goes on, for which weights are not
        compared: that takes a millisecond.
        """
        state = self._state if is_token and self._state is not None else weights_state(model)
        if self._model() is None and self._model.digest() == weights_digest(model):  # it was pickled
            self._be_of(model)
            self._state = state
        if self._state is None:
            self._state = state
        if not self.fits(model, state):
            raise UserError(
                "past_key_values: the memory is of another model, or the weights or the adapter have changed since it "
                "began: make one with model.new_memory()"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of blocks, pending tokens, windows and states, those of the marks included."""
        tensors: list[Any] = [self.ids, *(x for layer in self._others.values() for x in content_of(layer).values())]
        tensors += [x for _, between in self.memory.mark().values() for x in between.values()]
        for mark in self.marks or []:
            tensors += [x for layer in mark.others.values() for x in content_of(layer).values()]
            tensors += [x for _, between in mark.layers.values() for x in between.values()]
        storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
        return self.stats["bytes_kept"] + sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def mark(self) -> Mark:
        """The place that is reached, to `fork` from later. It holds pending tokens, and copies of the other layers."""
        at, others = self._settled
        others = others if at == self.memory.position else self._copies_of_others()
        return Mark(self.memory.tokens_read, self.memory.position, self.memory.mark(), others)

    def add_mark(self) -> None:
        """Keep a mark of the place that is reached; of too many one goes, rather far from the end than near it."""
        if self.marks is None or self.padded:
            return
        if not self.marks or self.marks[-1].tokens < self.memory.tokens_read:
            self.marks.append(self.mark())
        if len(self.marks) > MARKS:
            at, end = [0, *(mark.tokens for mark in self.marks)], self.memory.tokens_read + 1
            gaps = [(at[n + 2] - at[n]) / (end - at[n + 1]) for n in range(MARKS)]
            if self.ends:  # the first one is behind the texts that were read alone, and cannot be made again
                gaps[0] = torch.inf
            del self.marks[gaps.index(min(gaps))]

    def mark_before(self, tokens: int) -> Mark | None:
        """The last place among the first `tokens` of the text where `fork` can begin; None: there is none, as among
        tokens that are not all of the texts that were read alone.
        """
        if tokens < max(self.ends, default=0):
            return None
        if self.marks is not None and not self.has_others and (at := self.memory.fork_point(tokens)):
            return Mark(at, at, {}, {})
        marks = [mark for mark in self.marks or [] if mark.tokens <= tokens]
        return marks[-1] if marks and not self.memory.has_dropped else None

    def fork(self, mark: Mark) -> LandmarkCache:
        """A copy that has read the text up to one of the marks."""
        forked = self._copy(self.memory.beginning(mark.position, mark.layers))
        forked.ids = self.ids[:, : mark.tokens].clone()
        forked.marks = [each for each in self.marks or [] if each.tokens <= mark.tokens]
        forked._put({number: copied(layer) for number, layer in mark.others.items()})
        forked._settled = mark.position, mark.others
        return forked

    def select(self, samples: Tensor) -> LandmarkCache:
        """A copy whose samples are these of the batch. samples: (n,), integer; one may occur more than once."""
        chosen = self._copy(self.memory.select_samples(samples))
        chosen.padded, chosen.marks = self.padded and self.padded.select(samples), None
        if self.ids.numel():
            chosen.ids = self.ids[samples.to(self.ids.device)]
        chosen._put({number: copied(layer, samples) for number, layer in self._others.items()})
        at, others = self._settled
        chosen._settled = at, {number: copied(layer, samples) for number, layer in others.items()}
        return chosen

    def texts(self, batch: int) -> list[Tensor]:
        """The ids read of each of `batch` samples, without landmarks and padding."""
        if self.padded:
            return self.padded.texts()
        return list(self.ids) if self.ids.numel() else [self.ids.new_zeros(0)] * batch

    def divide(self, kinds: list[tuple[int, bool]]) -> list[Group]:
        """Group samples by the tokens they read next, as `PaddedBatch.divide`."""
        if self.padded is None:
            whole, columns, empty = copy.copy(self), self.get_seq_length(), self.empty()
            empty._state = self._state
            self._become(empty)
            self.padded = PaddedBatch([Group(list(range(len(kinds))), whole)], columns)
        return self.padded.divide(kinds)

    def _become(self, other: LandmarkCache) -> None:
        """Go on as another cache of the same model, with all that it has read."""
        vars(self).update(vars(other))

    def check_batch(self, batch: int) -> None:
        """Raise UserError where a batch of so many texts cannot go on with this memory."""
        if self.torn:
            raise UserError("an error left a text read in part: reset() the memory, or load it again")
        if self.batch_size and batch != self.batch_size:
            raise UserError(f"the ids are of {batch} texts, the memory is of {self.batch_size}")

    @contextmanager
    def whole_batch(self, batch: int, columns: int) -> Iterator[None]:
        """Read `columns` tokens more, padding included. After an error in a chunk the memory can only be reset."""
        before = [len(text) for text in self.texts(batch)]
        try:
            yield
        except BaseException as error:
            is_whole = isinstance(error, GeneratorExit) and not self.padded  # nobody wants the rest
            self.torn = not is_whole and [len(text) for text in self.texts(batch)] != before
            raise
        if self.padded:
            self.padded.columns += columns

    @contextmanager
    def passing_together(self, positions: Tensor) -> Iterator[None]:
        """Let the chunks of all groups pass through the model at once, where only the memory keeps something."""
        self._chunk.positions = positions
        try:
            yield
        finally:
            self._chunk.positions = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text read so far, without landmarks; of a padded batch, padding included."""
        return self.padded.columns if self.padded else self.ids.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """For masks: keys of this layer before the next query, with landmarks."""
        layer: Any = self.layers[layer_idx]
        return layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0  # others have no masks of keys

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples of the batch."""
        if self.get_seq_length():
            self._become(self.select(indices))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the samples into this order, as beam search does; the memory of a sample may be copied."""
        if not torch.equal(beam_idx.cpu(), torch.arange(len(beam_idx))):
            self.batch_select_indices(beam_idx)

    @property
    def batch_size(self) -> int:
        """Samples of the batch that was read; 0 before."""
        return self.padded.size if self.padded else self.memory.batch_size

    @property
    def is_compileable(self) -> bool:
        """False: for `generate`, which else prepares masks."""
        return False

    @property
    def max_cache_len(self) -> int:
        """Raises UserError: PEFT asks for it, to make a cache of its own."""
        raise UserError(
            "PEFT's prefix tuning puts keys before a text, which a landmark memory does not have: generate without "
            "landmarks (past_key_values=DynamicCache())"
        )


def joined(memories: Iterable[LandmarkCache]) -> LandmarkCache:
    """One memory of the texts that several have read alone: they can be asked together, as if they were one text.

    A text keeps the keys and values that it has alone; its tokens stand behind those of the texts before. Each memory
    is copied when it comes, so a generator needs room for one of them beside the joined one. The settings are those
    of the first. Raises UserError as `LandmarkCache.append`.
    """
    found: LandmarkCache | None = None
    for each in memories:
        found = each.empty() if found is None else found
        found.append(each)
    if found is None:
        raise UserError("several memories: there is none")
    return found


class _ModelRef:
    """The model of a memory, which no memory holds. Copies refer to the same; a pickled one has the digest alone."""

    def __init__(self, model: PreTrainedModel | None, digest: str | None = None):
        self._model, self._digest = model if model is None else weakref.ref(model), digest

    def __call__(self) -> PreTrainedModel | None:
        return None if self._model is None else self._model()

    def digest(self) -> str | None:
        model = self()
        return self._digest if model is None else weights_digest(model)

    def __deepcopy__(self, _: Any) -> _ModelRef:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModelRef, (None, self.digest())


def saved_windows(folder: Path, ids_alone: bool = False) -> dict[str, Tensor]:
    """A saved memory's ids, IDS (B, n), and the windows and states of layers. Raises UserError where it is damaged."""
    try:
        open_written(folder / WINDOWS).close()
        with safe_open(folder / WINDOWS, "pt") as tensors:  # a map of the file: what is not used is not read
            names = {IDS} if ids_alone else {IDS, *tensors.keys()}
            return {name: tensors.get_tensor(name) for name in names}
    except (OSError, SafetensorError, UserError, RuntimeError) as error:  # RuntimeError: it is deleted
        raise UserError(f"{folder}/{WINDOWS} is missing or damaged: save the cache, not its memory") from error


class Mark(NamedTuple):
    """A place in a text: what a cache keeps there beside the blocks, by reference. tokens: read so far, without
    landmarks; position: with them. layers: by number, blocks stored and `LayerMemory.between`. others: by number,
    copies of the other layers, which nothing changes.
    """

    tokens: int
    position: int
    layers: dict[int, tuple[int, dict[str, Tensor]]]
    others: dict[int, Any]
