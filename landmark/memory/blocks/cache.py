"""The memory of a pretrained model that reads without training: all keys and values, of which a query reads few.

Texts have no landmarks; a block is found by a summary of it (attention.py says how, scorer.py which). Keys are kept as
the model rotates them, so nothing is rotated anew when a text grows beyond the positions that the model knows: far
blocks are then turned towards the query when they are read.
"""

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from landmark.attention import Scoring, Sinks, backend_for
from landmark.memory.blocks.attention import (
    AttentionConfig,
    Text,
    block_rope_factors,
    blocks_of_queries,
    read_all,
    read_chosen,
    rotated_summaries,
    shares_of_blocks,
)
from landmark.memory.blocks.scorer import BlockScorer, Rotation, scorer_of
from landmark.memory.retrievals import Observer, Retrieval, Stored
from landmark.memory.saving import (
    CONTENT,
    FORMAT,
    REMEDY,
    SAME,
    TENSORS,
    K,
    Place,
    check_read,
    device_of,
    new_folder,
    read_content,
)
from landmark.memory.text_memory import Piece
from landmark.memory.tiers import grown, mapped_file, new_buffer
from landmark.utils.errors import UserError
from landmark.utils.files import name_in_errors, write_atomic, write_json

LOG = logging.getLogger(__name__)
DENSE = {"cpu": 6144}  # tokens up to which reading all keys was measured to be no slower, by device
DENSE_ELSEWHERE = 16384
LOGITS = 512  # most tokens of a piece where many get logits, which take more memory than all else
SIZE = "model.block_size"
GRANULARITY = "retrieval.granularity"
FEW = 4  # most queries that a CPU reads one by one, so that guesses of an answer change no bit of it
SPARE = 8  # for so many rows at least one more is made room for


def has_kernels(q: Tensor, block_size: int) -> bool:
    """Whether there are kernels for such queries."""
    return q.is_cuda and _are_kernels(q.dtype, q.shape[-1], block_size, q.device)


@cache
def _are_kernels(dtype: torch.dtype, dim: int, block_size: int, device: torch.device) -> bool:
    return backend_for("auto", torch.empty(0, dim, dtype=dtype, device=device), block_size) == "triton"


@cache
def _tell_plain(setting: str) -> None:
    LOG.warning(f"{setting} has no kernels: blocks are chosen and read in plain PyTorch, more slowly")


def rotate_by(frequencies: Tensor, keys: Tensor, distances: Tensor) -> Tensor:
    """Keys as if they stood later in the text (`landmark.memory.blocks.scorer.Rotation`).

    frequencies: (r/2,), radians a position, of the pairs of channels i and i + r/2; the other channels do not turn.
    """
    angles = distances[..., None, None].double() * frequencies.to(keys.device).double()
    exact, pairs = keys.to(torch.promote_types(keys.dtype, torch.float32)), len(frequencies)
    cos, sin = angles.cos().to(exact.dtype), angles.sin().to(exact.dtype)
    first, second, out = exact[..., :pairs], exact[..., pairs : 2 * pairs], exact.clone()
    out[..., :pairs].mul_(cos).addcmul_(second, sin, value=-1)
    out[..., pairs : 2 * pairs].mul_(cos).addcmul_(first, sin)
    return out.to(keys.dtype)


class Part(NamedTuple):
    """Queries at the positions from `start` up to `stop`. is_far: they choose blocks. rotation: by which these are
    moved; None: they stay where they stand.
    """

    start: int
    stop: int
    is_far: bool
    rotation: Rotation | None


class BlockCache:
    """Keys and values of a text in all layers with full attention.

    For each chunk every layer calls `attend`, and one `commit` ends the chunk. A query at position t reads

    1. all keys, as the model was trained, where t is less than `dense`, or where k blocks are all that there are;
    2. else the last `window` tokens, and the k blocks that it chooses: alone, or, where no token of the chunk is
       predicted (`begin`), together with the other queries of a block.

    Queries that choose together know the later tokens of their block. So only a block that was read as a whole is
    *settled*: it is the same whatever was read afterwards. `settle` forgets the tokens behind the last settled block,
    to be read again as a part of the text that now follows.

    model: returns a string that identifies the model; it may be set. A saved memory is loaded only if this string is
    the same. None: the model has no such string. settled: tokens at the beginning of the text whose keys and values
    depend on the text alone. ends: positions at which texts end that were read alone (`append`); (): the text is one.
    """

    is_rotated = True  # whether keys come with the positions that the model gives them

    def __init__(
        self,
        block_size: int = 32,
        k: int = 128,
        *,
        window: int = 512,
        first: int = 1,
        dense: int | None = None,
        mapping: str = "auto",
        positions: int | None = None,
        frequencies: Tensor | None = None,
        unrotated_layers: Collection[int] = (),
        tier: str = "device",
        folder: Path | str | None = None,
        observer: Observer | None = None,
        scorer: str | Mapping[str, Any] | BlockScorer = "mean_key",
        gates: bool = False,
        granularity: str = "per_token_and_group",
    ):
        """Start with nothing read. Raises UserError for a number out of range.

        Args:
            block_size: ℓ, tokens of a block.
            k: blocks that a query reads.
            window: tokens before a query that it always reads, rounded up to whole blocks.
            first: blocks that begin the text and are always among the k.
            dense: tokens at the start of a text whose queries read all keys; None: as many as are read at least as fast
                as by blocks, and no more than `positions`.
            mapping: "true": keys have their true positions; "stingy": far blocks are read as if they stood in k + 1
                places before the window; "auto": stingy only beyond `positions`.
            positions: that the model was trained on; None: any number.
            frequencies: (r/2,), radians per position of each pair that the model rotates.
            unrotated_layers: layers whose keys have no positions.
            tier, folder: where keys and values lie, as of `Store`.
            observer: called with a `Retrieval` whenever a layer attends.
            scorer: what stands for a block, as of `scorer_of`. gates: whether chosen blocks weigh as it scores them.
            granularity: what chooses blocks together: the heads that share keys ("per_token_and_group"), none
                ("per_token_and_head"), all heads ("per_token"), or the tokens of a block that are read in one chunk
                ("per_head", each head alone; they look ahead). The first alone has kernels.
        """
        if block_size < 1 or k < 1 or not 0 <= first <= k or window < 0 or (dense or 0) < 0:
            raise UserError(
                f"block_size={block_size}, k={k}, window={window}, first={first}, dense={dense}: must be at least 1, "
                "1, 0, 0 to k, and 0"
            )
        self.window = -(-window // block_size) * block_size
        self.block_size, self.k, self.first = block_size, k, first
        self.dense, self.observer = dense, observer
        self._config = AttentionConfig(
            block_size,
            self.window,
            k,
            first,
            scorer=scorer_of(scorer),
            gates=gates,
            alone=granularity in ("per_token_and_head", "per_head"),
        )
        self._granularity = granularity
        self.unrotated_layers = frozenset(unrotated_layers)
        self._mapping = mapping
        self._true_positions = {"true": None, "auto": positions, "stingy": 0}[mapping]
        self._frequencies = frequencies
        self._rotation = None if frequencies is None else partial(rotate_by, frequencies)
        self._trained, self._tier, self._folder = positions, tier, folder
        self.model: Callable[[], str | None] | None = None
        self._prefill = False
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new text begins."""
        self.position = self.settled = 0  # tokens committed
        self._reads_all = 0  # once it is known, tokens at the start of the text whose queries read all keys
        self._length = 0  # tokens of the current chunk
        self._expected = 0  # tokens of the text, as far as it is known
        self._chunks = 0
        self.layers: dict[int, _Layer] = {}
        self.ends: tuple[int, ...] = ()
        self._begin_tokens()

    def _begin_tokens(self) -> None:
        self._ready: int | None = None  # the position for which `ready_for_token` was called
        self._positions: dict[torch.device, Tensor] = {}  # this position, on each device
        self._factors_on: dict[torch.device, Tensor] = {}

    @property
    def scorer(self) -> BlockScorer:
        """What stands for a block."""
        return self._config.scorer

    @property
    def width(self) -> int:
        """Positions of a block in the text."""
        return self.block_size

    @property
    def tokens_read(self) -> int:
        return self.position

    @property
    def visible_from(self) -> int:
        """The first position that the next query sees without choosing its block."""
        return self._config.far(self.position) * self.block_size

    @property
    def batch_size(self) -> int:
        """Samples of the batch that was read; 0 before."""
        return max((layer.batch for layer in self.layers.values()), default=0)

    @property
    def stats(self) -> dict[str, Any]:
        """chunks committed, blocks_kept in a layer, bytes_kept in all."""
        blocks, kept = self.position // self.block_size, [x for layer in self.layers.values() for x in layer.tensors]
        return {
            "chunks": self._chunks,
            "blocks_kept": blocks if self.layers else 0,
            "bytes_kept": sum(x.nbytes for x in kept),
        }

    def expect(self, tokens: int) -> None:
        """Make room for so many tokens more, when the next are read."""
        self._expected = max(self._expected, self.position + tokens)

    def begin(self, prefill: bool) -> None:
        """The next piece begins. prefill: whether none of its tokens gets logits."""
        self._prefill = prefill

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None = None
    ) -> Tensor:
        """Attention (B, H, T, d) of a chunk, which continues the committed text.

        q: (B, H, T, d), k, v: (B, H_kv, T, d), rotated by the model. scoring, sinks: of the layer. Raises UserError
        where the text so far has keys of another type.
        """
        state = self.layers.get(layer)
        if state is not None and q.shape[2] == 1 and self._by_kernels(state, q, k):
            return self._attend_one(layer, q, k, v, scoring, sinks)
        self._write(layer, k, v)
        self._reads_all = max(self._dense_on(q.device.type), self._config.covered)
        out, lse = self._read(layer, q, self._config_of(layer, q, scoring))
        return out if sinks is None else sinks.merge(out, lse)[0]

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the keys and values (B, H_kv, T, d) of a chunk."""
        if layer not in self.layers:
            self.layers[layer] = self.new_layer(layer, k)
        start, length = self.position, k.shape[2]
        keys, values = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        self.layers[layer].write(start, keys, values, self._rounded(start + length), self._expected)
        self._length = length

    def _config_of(self, layer: int, q: Tensor, scoring: Scoring) -> AttentionConfig:
        """How the queries (B, H, T, d) of a chunk are read."""
        length, config = q.shape[2], self._of_layer(layer)
        config = replace(config, scale=scoring.scale_of(q.shape[3]), softcap=scoring.softcap)
        if length > 1 and (self._prefill or self._granularity == "per_head"):
            config = replace(config, tile=self.block_size)
        if self._granularity == "per_token":
            state = self.layers[layer]
            config = replace(config, together=len(state.keys) // state.batch)
        if length > 1 and self._has_kernels(q) and q.dtype != torch.float32:
            from landmark.memory.blocks import prefill_kernels as kernels

            config = replace(config, tiles_by=kernels.read_tiles)
        return config

    def _read(self, layer: int, q: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
        """Attention (B, H, T, d) of a chunk that is written, and its log-sum-exp (B, H, T)."""
        state, start, length = self.layers[layer], self.position, q.shape[2]
        queries, parts = q.reshape(len(state.keys), -1, *q.shape[2:]), []
        stored = Text(*state.tensors)
        if length > 1:  # from another tier all blocks are copied at once, for many queries read most of them
            keys, values, summaries = (x.to(q.device, non_blocking=True) for x in stored[:3])
            stored = Text(keys, values, summaries)
        for first, stop, is_far, rotation in self._parts(layer, start, length, config, q.device.type):
            text, part = stored, queries[:, :, first - start : stop - start]
            if rotation is not None:
                rotated = state.rotated_summaries(rotation, config)
                text = stored._replace(
                    rotation=rotation, rotated=rotated, factors=config.tiles_by and self._rope_factors(q.device)
                )
            out, lse, *tiles = (read_chosen if is_far else read_all)(part, text, first, config)
            parts.append((out, lse))
            if self.observer is not None:
                blocks = blocks_of_queries(tiles[0], first, part, config) if tiles else None
                self._observe(layer, part, text, first, config, lse, blocks)
        out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, 2) for x in zip(*parts, strict=True))
        return out.reshape(q.shape), lse.reshape(q.shape[:3])

    def _of_layer(self, layer: int) -> AttentionConfig:
        scorer = self._config.scorer.in_layer(layer)
        return self._config if scorer is self._config.scorer else replace(self._config, scorer=scorer)

    def new_layer(self, number: int, like: Tensor) -> "_Layer":
        """An empty layer for keys and values such as `like` (B, H_kv, T, d)."""
        return _Layer(len(like), like, self._of_layer(number), self._tier, self._folder)

    def _has_kernels(self, q: Tensor) -> bool:
        """Whether kernels read queries such as q."""
        found = has_kernels(q, self.block_size)
        is_of_group = self._granularity == "per_token_and_group"
        if found and (self._config.gates or not is_of_group or not self._config.scorer.has_kernels):
            scorer = f"retrieval.scorer={self._config.scorer.saved()}"
            own = scorer if is_of_group else f"{GRANULARITY}={self._granularity}"
            _tell_plain("retrieval.gates" if self._config.gates else own)
            return False
        return found

    def _by_kernels(self, state: "_Layer", q: Tensor, k: Tensor) -> bool:
        """Whether kernels read a token of a layer."""
        here = self._tier == "device" and self.observer is None and state.keys.device == q.device
        return here and self._has_kernels(q) and q.dtype == k.dtype == state.keys.dtype

    def token_kernels(self, device: torch.device, layers: int) -> "BlockCache | None":
        """Itself, where kernels read the next token in all layers, which are on this device; else None."""
        found = self.layers.values()
        if not found or len(found) < layers:
            return None
        can_read = all(x.keys.device == device and self._by_kernels(x, x.keys, x.keys) for x in found)
        return self if can_read else None

    def _rope_factors(self, device: torch.device) -> Tensor | None:
        """`block_rope_factors` of as many blocks as there is room for; None: no key is rotated."""
        if self._frequencies is None:
            return None
        blocks = 1 + max(state.summaries.shape[1] for state in self.layers.values())
        if device not in self._factors_on or len(self._factors_on[device]) < blocks:
            self._factors_on[device] = block_rope_factors(self._frequencies.to(device), blocks, self.block_size)
        return self._factors_on[device]

    def ready_for_token(self) -> tuple[int, ...]:
        """Get ready to read one token. Returns what its kernels depend on, of all that is not in the tensors."""
        start, fixed = self.position, list[int]()
        for layer, state in self.layers.items():
            part = self.part_at(layer, start, state.keys.device.type)
            state.make_room(self._rounded(start + 1), max(self._expected, start + start // SPARE))
            if part.rotation is not None:
                fixed.append(state.rotated_summaries(part.rotation, self._config).data_ptr())
            fixed += [int(part.is_far), state.keys.shape[1], *(x.data_ptr() for x in state.tensors)]
        for device in {state.keys.device for state in self.layers.values()}:
            if device not in self._positions:
                self._positions[device] = new_buffer(dtype=torch.int64, device=device)
            fixed += [
                x.data_ptr()
                for x in (self._positions[device].fill_(start), self._rope_factors(device))
                if x is not None
            ]
        self._ready = start
        return tuple(fixed)

    def _attend_one(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """`attend` to one token, by kernels. A CUDA graph may hold it, once `ready_for_token` was called."""
        from landmark.memory.blocks import decode_kernels as kernels

        if self._ready != self.position:
            self.ready_for_token()
        state, position = self.layers[layer], self._positions[q.device]
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        config = replace(self._config, scale=scoring.scale_of(q.shape[3]), softcap=scoring.softcap)
        part = self.part_at(layer, self.position, q.device.type)
        text = Text(*state.tensors)
        if part.rotation is not None:
            text = text._replace(rotated=state.rotated, factors=self._rope_factors(q.device))
        kernels.store(k, v, text, position, config)
        chosen = kernels.choose(q, text, position, config) if part.is_far else None
        out, lse = kernels.read(q, text, position, chosen, config)
        self.took_token()
        return out if sinks is None else sinks.merge(out, (lse * math.log(2)).logsumexp(0).view(q.shape[:3]))[0]

    def took_token(self) -> None:
        """Count the token that a CUDA graph has read in all layers."""
        self._length = 1
        for state in self.layers.values():
            state.written = self.position + 1

    def chooses(self, tokens: int, device: str) -> bool:
        """Whether queries of a text of so many tokens choose blocks, and do not all read all keys."""
        return tokens > max(self._dense_on(device), self._config.covered)

    def _dense_on(self, device: str) -> int:
        """Tokens at the start of a text whose queries read all keys."""
        if self.dense is not None:
            return self.dense
        return min(DENSE.get(device, DENSE_ELSEWHERE), self._trained or DENSE_ELSEWHERE)

    def _parts(self, layer: int, start: int, length: int, config: AttentionConfig, device: str) -> Iterator[Part]:
        """A chunk in parts, each of which is read in one way."""
        kept = None if layer in self.unrotated_layers else self._true_positions
        bounds = [max(self._dense_on(device), config.covered)]
        if kept is not None:  # whole groups, so that all queries of one are read alike
            bounds.append(max(bounds[0], kept // config.group * config.group))
        end = start + length
        cuts = {start, end, *(bound for bound in bounds if start < bound < end)}
        if device == "cpu" and length <= FEW and config.tile == 1:
            cuts |= {*range(start, end)}
        for first, stop in pairwise(sorted(cuts)):
            beyond = kept is not None and first >= bounds[-1]
            yield Part(first, stop, first >= bounds[0], self._rotation if beyond else None)

    def part_at(self, layer: int, position: int, device: str) -> Part:
        """How the query at a position is read, alone."""
        return next(self._parts(layer, position, 1, self._config, device))

    def commit(self) -> None:
        """End the chunk in every layer."""
        self._chunks += bool(self._length)
        is_settled, self.position = self.settled == self.position, self.position + self._length
        if is_settled:
            read = self.position if self._prefill else min(self.position, self._reads_all)
            self.settled = max(self.settled, self._whole(read))
        self._length = 0

    attend_in = attend

    def append(self, other: "BlockCache", settled: int | None = None) -> None:
        """Let a text that another memory has read alone follow: its keys are turned to the positions that it now has.
        Of it at most the last block is to be read again (`settle`), behind all texts. settled: its first tokens that
        are not read again (None: those of whole blocks). Raises UserError for keys of another type; then nothing has
        changed.
        """
        types = {x.keys.dtype for each in (self, other) for x in each.layers.values()}
        if len(types) > 1:
            raise UserError(
                f"several memories: they have keys of different types ({', '.join(sorted(map(str, types)))})"
            )
        start = self.position
        for number, state in other.layers.items():
            keys, values = (x[:, : other.position] for x in (state.keys, state.values))
            own = self.layers.get(number)
            if own is None:
                own = self.layers[number] = self.new_layer(number, keys.unflatten(0, (state.batch, -1)))
            if start and self._rotation is not None and number not in self.unrotated_layers:
                keys = self._rotation(keys[:, None], torch.tensor([start], device=keys.device))[:, 0]
            own.write(start, keys, values, self._rounded(start + other.position), self._expected)
        self.position += other.position
        whole = self._whole(start + other.settled) if start else other.settled
        self.settled = whole if settled is None else start + settled
        behind = (start + end for end in (*other.ends[:-1], other.position))
        self.ends = (*self.ends[:-1], start, *behind) if start else other.ends
        self._chunks += other._chunks

    def is_end(self, tokens: int, local: int) -> bool:
        """Whether another text may go on here: where all is settled, but not behind each generated token."""
        return tokens > 1 and self.settled == self.position

    def fork_point(self, tokens: int) -> int:
        """The last place among the first `tokens` of the text before which nothing depends on what follows; 0: they
        are not all of the texts that were read alone.
        """
        return self._whole(min(tokens, self.settled)) if tokens >= max(self.ends, default=0) else 0

    def _whole(self, tokens: int) -> int:
        """Tokens up to the last block's end, or those that read all keys."""
        if tokens <= self._reads_all:
            return tokens
        return max(self._reads_all, tokens // self.block_size * self.block_size)

    def settle(self, at: int | None = None) -> None:
        """Forget the tokens that are not settled, or that are behind an earlier position; they are read again with the
        text that follows.
        """
        self.settled = self.settled if at is None else at
        if self.settled < self.position:
            self.position = self.settled
            self.discard()

    def takes_guesses(self, tokens: int, device: str) -> bool:
        """Where a CPU reads all keys: else each of them copies the blocks that it chooses, which takes longest."""
        return device == "cpu" and not self.chooses(self.position + tokens, device)

    def forget(self, tokens: int) -> None:
        """Take back the last tokens, which were guesses."""
        self.position -= tokens
        self.settled = min(self.settled, self.position)
        self.discard()

    def pieces(self, length: int, kept: int, most: Callable[[], int], device: str) -> Iterator[Piece]:
        """Where the next `length` tokens are cut, of which the last `kept` get logits. most: tokens of a piece.

        Tokens without logits (prefill) are read in whole blocks. Behind the last whole block every token chooses alone,
        so that the pieces, and the calls in which a text comes, do not show.
        """
        self._reads_all = max(self._dense_on(device), self._config.covered)
        before, whole, start, size = self.position, 0, 0, self.block_size
        if kept < length and self.chooses(before + length, device):
            whole = max(0, self._whole(before + length - kept) - before)
        while start < length:
            if start < whole:
                step = max(size, most() // size * size)
                stop = min(start + step - (before + start) % step, whole)
            else:
                stop = min(start + (min(most(), LOGITS) if kept > LOGITS else most()), length)
            yield Piece(start, stop, stop <= whole)
            start = stop

    def discard(self) -> None:
        """Forget a chunk that is not committed: where a layer failed, no layer has read it."""
        for state in self.layers.values():
            state.forget(self.position)
        self._length, self._ready = 0, None

    def select_samples(self, samples: Tensor) -> "BlockCache":
        """A copy whose samples are these of the batch, as beam search needs it. samples: (n,), integer."""
        if self._length:
            raise RuntimeError("a chunk is not committed yet: call commit() before select_samples()")
        chosen = copy.copy(self)
        chosen._begin_tokens()
        chosen.layers = {number: state.select(samples) for number, state in self.layers.items()}
        return chosen

    def observe(self, local: int) -> int:
        """Let all queries choose, also those that would read all keys; those of a block are read at a time. Raises
        UserError where shares of attention are not known.
        """
        if self._config.gates:
            raise UserError("retrieval.gates=true: shares of attention are those of one softmax, leave it out")
        if self._config.alone:
            own = f"{GRANULARITY}={self._granularity}"
            raise UserError(f"{own}: blocks are shown where heads choose together, leave it out")
        self.dense = 0
        return self.block_size

    has_dropped = False  # blocks never are

    def mark(self) -> dict[int, Any]:
        """Nothing: `beginning` needs no more than a position."""
        return {}

    def beginning(self, position: int, layers: Mapping[int, Any]) -> "BlockCache":
        """A copy that has read the text up to this position."""
        begun = self.select_samples(torch.arange(self.batch_size))
        begun.position, begun.settled = position, min(position, self.settled)
        for layer in begun.layers.values():
            layer.forget(position)
        return begun

    def save(self, folder: Path | str, others: Mapping[str, bytes] | None = None) -> None:
        """Write everything to a new folder. A memory of the same model, on any tier, can `load` it.

        others: further files of that folder, by name. Raises UserError, and leaves nothing behind, where the folder
        exists or the disk is full.
        """
        with new_folder(Path(folder)) as temporary:
            tensors, end = {}, self.position
            for number, state in self.layers.items():
                for name, x in (("keys", state.keys), ("values", state.values)):
                    tensors[f"{number}.{name}"] = x[:, :end].unflatten(0, (state.batch, -1)).contiguous()
            places: dict[str, Any] = {"position": end, **({} if self.settled == end else {"settled": self.settled})}
            places |= {"ends": self.ends} if self.ends else {}
            content = {"format": FORMAT, **self._identity(), **self._read_with(self.layers), **places}
            with name_in_errors(folder):
                save_file(tensors, temporary / TENSORS)
            write_json(temporary / CONTENT, content)
            for name, content in (others or {}).items():
                write_atomic(temporary / name, content)

    def load(self, folder: Path | str, device: Place = "cpu") -> None:
        """Replace the content by that of a saved memory. device: of the model, or of each layer by its number.

        Raises UserError for a file that is missing or altered, and for a memory of another model, with landmarks, or
        read with other settings; then the content stays as it was.
        """
        folder = Path(folder)
        content = read_content(folder, {"position": int, "landmarks": str})
        for key, own in self._identity().items():
            if content.get(key) != own:
                why = SAME if key == "model" else f"was saved with {key}={content.get(key)}, here it is {own}"
                raise UserError(f"{folder} {why}")
        layers: dict[int, _Layer] = {}
        try:
            with safe_open(folder / TENSORS, "pt") as tensors:
                for number in sorted({int(name.partition(".")[0]) for name in tensors.keys()}):  # noqa: SIM118
                    saved = (tensors.get_tensor(f"{number}.{name}") for name in ("keys", "values"))
                    keys, values = (x.to(device_of(device, number)) for x in saved)
                    if keys.ndim != 4 or keys.shape != values.shape:  # (B, H, n, d)
                        raise ValueError(f"keys and values of layer {number} do not fit each other")
                    state = layers[number] = self.new_layer(number, keys)
                    state.write(0, keys.flatten(0, 1), values.flatten(0, 1), self._rounded(keys.shape[2]), 0)
        except torch.OutOfMemoryError:
            raise
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise UserError(f"{folder / TENSORS} is damaged ({error}): {REMEDY}") from error
        position, settled = content["position"], content.get("settled", content["position"])
        if any(state.written != position for state in layers.values()):
            raise UserError(f"{folder / CONTENT}: position={position} is not that of the tensors: {REMEDY}")
        if not isinstance(settled, int) or not 0 <= settled <= position:
            raise UserError(f"{folder / CONTENT}: settled={settled} must be from 0 to position={position}: {REMEDY}")
        ends = content.get("ends", [])
        bounds = [0, *ends, position + 1] if isinstance(ends, list) else []
        if not bounds or any(type(b) is not int or a >= b for a, b in pairwise(bounds)):
            raise UserError(f"{folder / CONTENT}: ends={ends} must rise from 1 to position={position}: {REMEDY}")
        self._check_read(folder, content, layers)
        self.reset()
        self.position, self.settled, self.layers, self.ends = position, settled, layers, tuple(ends)

    def _identity(self) -> dict[str, Any]:
        """What must be equal in a memory that loads this one."""
        return {"landmarks": "none", "model": None if self.model is None else self.model()}

    def _read_with(self, layers: Mapping[int, "_Layer"]) -> dict[str, Any]:
        """How a text with these layers is read, by the names of settings; of dense the number that null stands for."""
        device = next((layer.device for layer in layers.values()), torch.device("cpu"))
        read = {SIZE: self.block_size, K: self.k, "retrieval.first": self.first, "memory.window": self.window}
        read |= {"memory.dense": self._dense_on(device.type), "positions.mapping": self._mapping}
        scorer = self.scorer.saved()
        if not isinstance(scorer, str):  # a file has another place elsewhere: who made the landmarks is checked
            own = {name: "null" if x is None else x for name, x in scorer.items() if name != "file"}
            scorer = ", ".join(f"{name}: {x}" for name, x in own.items())
            scorer = str(own["name"]) if len(own) == 1 else f"{{{scorer}}}"
        read |= {GRANULARITY: self._granularity}
        return read | {"retrieval.scorer": scorer, "retrieval.gates": self._config.gates}

    def _check_read(self, folder: Path, content: Mapping[str, Any], layers: Mapping[int, "_Layer"]) -> None:
        """Raise UserError where a saved text was read in another way than it would be here."""
        own = self._read_with(layers)
        saved = own | {key: content[key] for key in own if key in content}
        if any(type(saved[key]) is not type(own[key]) for key in own):
            raise UserError(f"{folder / CONTENT} is damaged: {REMEDY}")
        whole = [
            max(read["memory.dense"], AttentionConfig(read[SIZE], read["memory.window"], read[K]).covered)
            for read in (own, saved)
        ]
        is_same = content["position"] <= min(whole)  # all queries have read all keys
        check_read(folder, content, {SIZE: own[SIZE]} if is_same else own)

    def _rounded(self, tokens: int) -> int:
        """Tokens up to the end of the last group."""
        return -(-tokens // self._config.group) * self._config.group

    def _observe(
        self,
        layer: int,
        q: Tensor,
        text: Text,
        start: int,
        config: AttentionConfig,
        lse: Tensor,
        blocks: Tensor | None = None,
    ) -> None:
        """Tell the observer which blocks each query of (C, G, T, d) reads. Where all keys share a softmax and heads
        choose together, also the blocks' shares of its attention.
        """
        assert self.observer is not None
        batch, length, weights = self.layers[layer].batch, q.shape[2], None
        last = config.far(start + length - 1)
        if blocks is None:  # all that are far
            blocks = torch.arange(last, device=q.device).expand(len(q), length, -1)
        is_read = blocks < torch.tensor([[config.far(start + query)] for query in range(length)], device=q.device)
        if not config.gates and not config.alone:
            weights = shares_of_blocks(q, text, start, lse, blocks, config) * is_read[:, None]
            weights = weights.unflatten(0, (batch, -1)).flatten(1, 2)
        ages = ((last - blocks) * is_read).unflatten(0, (batch, -1))
        stored = Stored(last, len(q) // batch, 2 * self.block_size * q.shape[3] * q.element_size())
        self.observer(Retrieval(layer, start, stored, ages, weights))


class _Layer:
    """Keys and values (C, capacity, d) of a layer, for C = B·H_kv, and summaries (C, blocks, …) of complete blocks."""

    def __init__(self, batch: int, like: Tensor, config: AttentionConfig, tier: str, folder: Path | str | None):
        self.batch, self._like, self._tier, self._folder = batch, like[:0], tier, folder
        self._block_size, self._scorer = config.block_size, config.scorer
        caches, dim = like.shape[0] * like.shape[1], like.shape[-1]
        self.keys = self.values = self._new((caches, 0, dim))
        with torch.inference_mode(False):
            none = like.new_zeros(caches, 0, self._block_size, dim)
            self.summaries = self._scorer.summarise(none, none, 0)
        self.rotated = self.summaries  # as `rotated_summaries` returns them, of the first blocks
        self._num_rotated = 0
        self.written = 0

    @property
    def device(self) -> torch.device:
        """That of the model, where the tier may be elsewhere."""
        return self._like.device

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros on the tier; also under `torch.inference_mode` they can be written to later."""
        size, dtype = torch.Size(shape).numel(), self._like.dtype
        with torch.inference_mode(False):
            if self._tier == "device":
                return torch.zeros(shape, dtype=dtype, device=self._like.device)
            if self._tier == "cpu":
                return torch.zeros(shape, dtype=dtype, pin_memory=self._like.is_cuda)
            return mapped_file(size, dtype, self._folder).view(shape)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.summaries

    def write(self, start: int, k: Tensor, v: Tensor, room: int, expected: int) -> None:
        """Keep keys and values (C, T, d) of the tokens from position `start` on.

        room: tokens that there must be room for. expected: tokens of the text, as far as it is known.
        """
        if k.dtype != self.keys.dtype:
            raise UserError(
                f"the memory has keys of {self.keys.dtype}, this chunk of {k.dtype}: read all of a text under the "
                "same autocast and with weights of one type, or reset() the memory"
            )
        self.make_room(room, max(expected, start + start // SPARE))
        end, size = start + k.shape[1], self._block_size
        self.keys[:, start:end] = k
        self.values[:, start:end] = v
        first, last = start // size, end // size
        if first < last:
            complete = (x[:, first * size : last * size].to(self.summaries.device) for x in (self.keys, self.values))
            keys, values = (x.unflatten(1, (-1, size)) for x in complete)
            self._scorer.write(self.summaries[:, first:last], keys, values, first)
        self.written = end

    def rotated_summaries(self, rotation: Rotation, config: AttentionConfig) -> Tensor:
        """`landmark.memory.blocks.attention.rotated_summaries` of all complete blocks, each moved once."""
        done, complete = self._num_rotated, self.written // self._block_size
        if self.rotated.shape[1] != self.summaries.shape[1]:
            self.rotated = grown(self.rotated, 1, self.summaries.shape[1])
        if done < complete:
            self.rotated[:, done:complete] = rotated_summaries(self.summaries[:, done:complete], done, rotation, config)
            self._num_rotated = complete
        return self.rotated

    def make_room(self, least: int, tokens: int) -> None:
        """Have room for `least` tokens, and for `tokens` where it must grow."""
        if least > self.keys.shape[1]:
            self._grow(max(least, tokens))

    def _grow(self, tokens: int) -> None:
        blocks = -(-tokens // self._block_size)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._new((len(old), blocks * self._block_size, old.shape[2]))
            new[:, : old.shape[1]] = old
            setattr(self, name, new)
        self.summaries = grown(self.summaries, 1, blocks)

    def forget(self, position: int) -> None:
        """Forget the tokens from this position on."""
        self.keys[:, position : self.written] = 0
        self.values[:, position : self.written] = 0
        self.written, self._num_rotated = position, min(self._num_rotated, position // self._block_size)

    def select(self, samples: Tensor) -> "_Layer":
        chosen = copy.copy(self)
        chosen.batch = len(samples)
        for name in ("keys", "values", "summaries", "rotated"):
            x = getattr(self, name)
            rows = x.unflatten(0, (self.batch, -1)).index_select(0, samples.to(x.device)).flatten(0, 1)
            on_disk = self._tier == "disk" and name in ("keys", "values")
            setattr(chosen, name, self._new(rows.shape).copy_(rows) if on_disk else rows)
        return chosen
