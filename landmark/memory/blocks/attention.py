"""Attention to the last tokens of a text and to a few chosen blocks of it, over one flat cache of keys and values.

This is how a pretrained model reads without training. The text has no landmarks: a block is found by a summary of it,
and all keys that a query reads share one softmax. Keys are rotated as the model does it.

The text is cut into blocks of ℓ tokens, and into groups of g queries. The queries of a group see the tokens of their
group up to their own, and the w tokens before the group. The blocks before these are *far*: a query reads k of them. A
group consists of tiles of τ queries, which choose together; with τ = 1 each query chooses alone. The G heads that share
keys choose together, or with `alone` each for itself, or with `together` all heads of a sample. So what a query reads
depends on the text alone, not on the chunks in which it was read.
For each tile:

1. *First look*: the shares of the far blocks in a softmax over the scores of their summaries, which a scorer makes
   (scorer.py; the mean of the keys). Of the shares of the tile's G·τ rows the largest counts. The k best blocks are
   chosen.
2. *Read*: attention to the chosen blocks, to the w tokens and to the group, merged by their log-sum-exps.

With `gates` a block weighs as much as its score says, and not as the log-sum-exp of its keys' scores does: the paper's
grouped softmax (Section 3.1). Then far blocks have gates also where there are no more than k.

A tile chooses with its later queries, which know the tokens that an earlier one predicts. So tiles are for tokens that
are known, and predicted tokens choose alone.

Shapes: C caches, one for each sample and key/value head, each with G query heads. q (C, G, T, d); keys, values
(C, capacity, d); summaries (C, blocks, …), of the complete blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from landmark.attention.plain import attention_forward, merged
from landmark.attention.rotary import rotary_factors
from landmark.attention.scoring import capped
from landmark.memory.blocks.scorer import BlockScorer, Rotation
from landmark.memory.blocks.scorers.mean_key import Scorer as MeanKey

GATHERED = {"cpu": 1 << 19}  # numbers of keys gathered together: on a CPU as many as fit into its cache
GATHERED_ELSEWHERE = 1 << 28


@dataclass(frozen=True)
class AttentionConfig:
    """What a query reads, and how its scores are made.

    block_size: ℓ. window: w, a multiple of ℓ. k: far blocks. sinks: of the k, so many are those that begin the text.
    tile: τ, which divides ℓ or is a multiple of it. scale,
    softcap: of the scores. tiles_by: computes what `read_tiles` does, by kernels. scorer: of the layer. gates: whether
    chosen blocks weigh as its scores say, to each query of each head as its own. alone: whether each head chooses its
    own blocks. together: caches whose heads choose together, as those of a sample.
    """

    block_size: int
    window: int
    k: int
    sinks: int = 0
    tile: int = 1
    scale: float = 1.0
    softcap: float | None = None
    tiles_by: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    scorer: BlockScorer = MeanKey()  # noqa: RUF009 (it is frozen)
    gates: bool = False
    alone: bool = False
    together: int = 1

    @property
    def group(self) -> int:
        """g, queries that have the same last tokens and the same far blocks."""
        return max(self.tile, self.block_size)

    @property
    def covered(self) -> int:
        """Tokens at the start of a text that read all keys: they have at most k far blocks, or with gates none."""
        k = 0 if self.gates else self.k
        return -(-(self.window + (k + 1) * self.block_size) // self.group) * self.group

    def far(self, position: int) -> int:
        """Far blocks of the query at a position."""
        return max(0, position // self.group * self.group - self.window) // self.block_size


class Text(NamedTuple):
    """The cache of a text, with room up to the end of its last group, and zeros as keys and values behind its end.

    rotation: for a part beyond the positions that the model knows. Far blocks are then read as if they stood in k + 1
    places before the window (Section 3.2.1). None: they are read where they stand. rotated: with it, the summaries as
    `rotated_summaries` returns them. factors: for kernels with `rotation`, see `block_rope_factors`.
    """

    keys: Tensor
    values: Tensor
    summaries: Tensor
    rotation: Rotation | None = None
    rotated: Tensor | None = None
    factors: Tensor | None = None


def read_all(q: Tensor, text: Text, start: int, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Causal attention of the queries at positions start, start + 1, … to all keys.

    Returns (C, G, T, d), and the log-sum-exp (C, G, T).
    """
    keys, values = (x[:, : start + q.shape[2]].to(q.device) for x in (text.keys, text.values))
    if not start:
        return _causal(q, keys, values, config)
    rows, own, level = q.reshape(1, len(q), -1, q.shape[-1]), None, None  # heads share keys, so none is copied
    if q.shape[2] > 1:
        own = _causal(q, keys[:, start:], values[:, start:], config)
        keys, values, level = keys[:, :start], values[:, :start], own[1].reshape(1, len(q), -1)
    scoring = {"scale": config.scale, "softcap": config.softcap, "level": level}
    out, lse = attention_forward(rows, keys[None], values[None], **scoring)
    found = out.reshape(q.shape), lse.reshape(q.shape[:3])
    return found if own is None else merged(found, own)


def _causal(q: Tensor, keys: Tensor, values: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Causal attention of queries (C, G, T, d) to the keys (C, T, d) of their own tokens."""
    keys, values = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (keys, values))
    return attention_forward(q, keys, values, scale=config.scale, softcap=config.softcap, causal=True)


def read_chosen(q: Tensor, text: Text, start: int, config: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of the queries at positions start, start + 1, …, none of which is one of the `covered`.

    Returns (C, G, T, d), the log-sum-exp (C, G, T), and the blocks (C, n, k) that each tile reads; with `gates` no more
    than the last tile has, and those beyond a tile's far blocks weigh nothing; with `alone` (C, n·G, k).
    """
    if q.shape[2] == config.tile == 1:
        return _read_one(q, text, start, config)
    (caches, heads, length, dim), size, tiles = q.shape, config.group, config.group // config.tile
    before = start % size
    groups, start = -(-(before + length) // size), start - before
    behind = groups * size - before - length
    q = F.pad(q, (0, 0, before, behind)) if before or behind else q
    grouped = q.unflatten(2, (groups, size)).transpose(1, 2)  # (C, groups, G, g, d)
    rows = grouped.unflatten(3, (tiles, config.tile)).transpose(2, 3).reshape(caches, groups * tiles, -1, dim)
    far = tuple(number for group in range(groups) for number in [config.far(start + group * size)] * tiles)
    out, lse, chosen = (config.tiles_by or read_tiles)(
        rows, grouped, text, start, far, (before, before + length), config
    )
    out, lse = (x.unflatten(2, (heads, config.tile)).unflatten(1, (groups, tiles)).transpose(2, 3) for x in (out, lse))
    out, lse = (x.flatten(3, 4).transpose(1, 2).flatten(2, 3) for x in (out, lse))
    here = slice(before, before + length)
    return out[:, :, here], lse[:, :, here], chosen


def blocks_of_queries(chosen: Tensor, start: int, q: Tensor, config: AttentionConfig) -> Tensor:
    """The blocks (C, T, k) that each query reads, with `alone` (C·G, T, k). chosen, start, q: as of `read_chosen`."""
    heads, length = q.shape[1:3]
    if config.alone:
        chosen = chosen.unflatten(1, (-1, heads)).transpose(1, 2).flatten(0, 1)
    before = start % config.group if chosen.shape[1] > 1 or config.tile > 1 else 0
    return chosen.repeat_interleave(config.tile, 1)[:, before : before + length]


def read_tiles(
    rows: Tensor,
    grouped: Tensor,
    text: Text,
    start: int,
    far: tuple[int, ...],
    asking: tuple[int, int],
    config: AttentionConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention (C, n, G·τ, d) of n tiles to all that they read, its log-sum-exp, and the chosen blocks (C, n, k).

    rows: (C, n, G·τ, d), the queries of each tile. grouped: (C, groups, G, g, d), the same. start: position of the
    first. far: far blocks of each tile. asking: the first query that chooses, and the one after the last, counted from
    the first one; others are padding.
    """
    (caches, groups, heads, size, dim), tiles = grouped.shape, config.group // config.tile
    near = [x[:, start - config.window : start + groups * size].to(rows.device) for x in (text.keys, text.values)]
    keys, values = (x[:, config.window :].reshape(caches * groups, size, dim) for x in near)
    local = _causal(grouped.flatten(0, 1), keys, values, config)
    if config.window:
        windows = [x[:, :-size].unfold(1, config.window, size).transpose(2, 3) for x in near]  # (C, groups, w, d)
        level = local[1].reshape(caches, groups, -1)
        out, lse = attention_forward(
            grouped.flatten(2, 3), *windows, scale=config.scale, softcap=config.softcap, level=level
        )
        local = merged((out.reshape(local[0].shape), lse.reshape(local[1].shape)), local)
    own = [x.unflatten(0, (caches, groups)).unflatten(3, (tiles, config.tile)).transpose(2, 3) for x in local]
    local = own[0].reshape(rows.shape), own[1].reshape(rows.shape[:3])
    asks = None
    if config.tile > 1 and asking != (0, groups * size):
        asks = torch.arange(groups * size, device=rows.device)
        asks = ((asks >= asking[0]) & (asks < asking[1])).view(-1, 1, config.tile).expand(-1, heads, -1).flatten(1)
    together = GATHERED.get(rows.device.type, GATHERED_ELSEWHERE)
    parts, count, choosing = [], min(config.k, far[-1]), heads if config.alone else 1
    step = max(1, together // (caches * choosing * count * config.block_size * dim))
    for first in range(0, len(far), step):
        part = slice(first, first + step)
        chosen, gates = _choose(rows[:, part], text, far[part], None if asks is None else asks[part], config)
        if gates is not None and (lacking := count - chosen.shape[2]):
            chosen, gates = F.pad(chosen, (0, lacking)), F.pad(gates, (0, lacking), value=-torch.inf)
        places = _places(text.keys, chosen, config)
        keys, values = (_copies(x, places, config) for x in (text.keys, text.values))
        if text.rotation is not None:
            keys = text.rotation(keys, _distances(chosen, _of_heads(far[part], choosing), config))
        own, level = (x[:, part].unflatten(2, (choosing, -1)).flatten(1, 2) for x in (rows, local[1]))
        if gates is None:
            scoring = {"scale": config.scale, "softcap": config.softcap, "level": level}
            found = attention_forward(own, keys.flatten(2, 3), values.flatten(2, 3), **scoring)
        else:
            found = read_gated(own, keys, values, gates, config)
        found = [x.unflatten(1, (-1, choosing)).flatten(2, 3) for x in found]
        parts.append((*found, chosen))
    out, lse, chosen = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    return *merged((out, lse), local), chosen


def read_gated(
    q: Tensor, keys: Tensor, values: Tensor, gates: Tensor, config: AttentionConfig
) -> tuple[Tensor, Tensor]:
    """The paper's grouped softmax over blocks alone: attention to each block, weighed by its gate.

    q: (C, n, R, d). keys, values: (C, n, k, ℓ, d). gates: (C, n, R, k), float32 or float64; −∞: the block is not seen.
    Returns (C, n, R, d) and the log-sum-exp of the gates (C, n, R).
    """
    scores = capped(q * config.scale @ keys.flatten(2, 3).mT, config.softcap).to(gates.dtype)
    inside, lse = scores.unflatten(-1, (-1, config.block_size)).softmax(-1), gates.logsumexp(-1)
    weights = (inside * gates.softmax(-1).nan_to_num(0.0)[..., None]).flatten(-2)
    return weights.to(values.dtype) @ values.flatten(2, 3), lse


def _read_one(q: Tensor, text: Text, position: int, config: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`read_chosen` of one query (C, G, 1, d): one attention to copies of all blocks that it reads."""
    rows, far, choosing = q.transpose(1, 2), config.far(position), q.shape[1] if config.alone else 1
    last = constant(range(far, position // config.block_size + 1), q.device).expand(len(q), choosing, -1)
    chosen, gates = _choose(rows, text, (far,), None, config)
    rows = q if config.alone else rows
    read, count = torch.cat([chosen, last], -1), chosen.shape[2]
    places = _places(text.keys, read, config)
    keys, values = (_copies(x, places, config) for x in (text.keys, text.values))
    if text.rotation is not None:
        moved = text.rotation(keys[:, :, :count], _distances(chosen, (far,) * choosing, config))
        keys = torch.cat([moved, keys[:, :, count:]], 2)
    scoring, own = {"scale": config.scale, "softcap": config.softcap}, position + 1 - far * config.block_size
    if gates is None:
        keys, values = (x.flatten(2, 3)[:, :, : count * config.block_size + own] for x in (keys, values))
        out, lse = attention_forward(rows, keys, values, **scoring)
    else:
        local = attention_forward(rows, *(x[:, :, count:].flatten(2, 3)[:, :, :own] for x in (keys, values)), **scoring)
        out, lse = merged(read_gated(rows, keys[:, :, :count], values[:, :, :count], gates, config), local)
    return *((out, lse) if config.alone else (out.transpose(1, 2), lse.transpose(1, 2))), chosen


def _of_heads(far: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Far blocks of each tile, once for each of its heads."""
    return tuple(number for number in far for _ in range(heads))


def _choose(
    q: Tensor, text: Text, far: tuple[int, ...], asks: Tensor | None, config: AttentionConfig
) -> tuple[Tensor, Tensor | None]:
    """The blocks (C, n, k) that n tiles choose, in order where they are moved, and with `gates` theirs (C, n, G·τ, k).

    With `alone` (C, n·G, k), of each head of a tile, and (C, n·G, τ, k).

    q: (C, n, G·τ, d), of each tile. far: far blocks of each tile, more than k, or with gates at least one, in order.
    asks: (n, G·τ), bool, rows that choose; None: all do.
    """
    least, count = far[0], far[-1]
    q, summaries = q * config.scale, text.summaries[:, :count]
    behind, blocks = constant(far, q.device), constant(range(count), q.device)
    seen = blocks < behind[:, None] if least < count else None

    def scores_of(rows: Tensor, own: Tensor) -> Tensor:
        return config.scorer.score(rows.unflatten(2, (-1, config.tile)), own, config.softcap).flatten(2, 3)

    exact = q.to(summaries.dtype)
    scores = scores_of(exact, summaries)
    if (
        text.rotation is not None
    ):  # older blocks than the last k are scored where k + 1 blocks before the window would be
        assert text.rotated is not None
        turned = text.rotation(exact, -behind * config.block_size)
        older = blocks < behind[:, None, None] - config.k
        scores = torch.where(older, scores_of(turned, text.rotated[:, :count]), scores)
    if config.alone:
        heads = scores.shape[2] // config.tile
        scores = scores.unflatten(2, (heads, config.tile)).flatten(1, 2)
        seen = None if seen is None else seen.repeat_interleave(heads, 0)
        asks = None if asks is None else asks.unflatten(1, (heads, config.tile)).flatten(0, 1)
    shares = _shares(scores, seen, asks).amax(2)
    if config.together > 1:
        shares = shares.unflatten(0, (-1, config.together)).amax(1).repeat_interleave(config.together, 0)
    shares[..., : config.sinks].fill_(torch.inf)
    chosen = highest(shares, seen, config.k)
    chosen = chosen if text.rotation is None else chosen.sort(-1).values
    if not config.gates:
        return chosen, None
    sets = chosen.shape[1] // len(far)  # that a tile chooses
    behind_each = _of_heads(far, sets)
    if text.rotation is None:
        gates = scores.gather(-1, chosen[:, :, None].expand(-1, -1, scores.shape[2], -1))
    else:
        caches, distances = torch.arange(len(q), device=q.device)[:, None], _distances(chosen, behind_each, config)
        found = []
        for number in range(chosen.shape[1]):  # a gate is of the place where its block is read
            own = summaries[caches, chosen[:, number]]
            own = config.scorer.moved(own, text.rotation, distances[:, number])
            of_tile = scores_of(exact[:, number // sets, None], own)
            found.append(of_tile.unflatten(2, (sets, -1))[:, :, number % sets])
        gates = torch.cat(found, 1)
    if seen is not None:
        is_behind = chosen >= constant(behind_each, q.device)[:, None]
        gates = gates.masked_fill(is_behind[:, :, None], -torch.inf)
    return chosen, gates.to(torch.promote_types(gates.dtype, torch.float32))


def rotated_summaries(summaries: Tensor, first: int, rotation: Rotation, config: AttentionConfig) -> Tensor:
    """Summaries (C, n, …) of the blocks from number `first` on, as if each stood k + 1 blocks before the text's
    beginning.

    A query that is moved back by the tokens before its window sees them k + 1 blocks before that. So they are moved
    once, and not again for each query.
    """
    blocks = torch.arange(first, first + summaries.shape[1], device=summaries.device)
    return config.scorer.moved(summaries, rotation, -(blocks + config.k + 1) * config.block_size)


def block_rope_factors(frequencies: Tensor, blocks: int, block_size: int) -> Tensor:
    """Cosines and sines (blocks, pairs, 2), float32, of the angles by which keys turn in 0, 1, 2, … blocks."""
    positions = torch.arange(blocks, device=frequencies.device) * block_size
    return torch.view_as_real(rotary_factors(positions, 2 * len(frequencies), frequencies, torch.float32))


def _shares(scores: Tensor, seen: Tensor | None, asks: Tensor | None) -> Tensor:
    """The softmax of scores (C, n, R, s), 0 for places that are not seen (…, n, s), and for rows that do not ask."""
    if seen is not None:
        scores = scores.masked_fill(~seen[..., None, :], -torch.inf)
    shares = scores.softmax(-1)
    return shares if asks is None else shares * asks[..., None]


def highest(shares: Tensor, seen: Tensor | None, count: int) -> Tensor:
    """The places (C, n, count) of the highest shares (C, n, s)."""
    if seen is not None:
        shares = shares.masked_fill(~seen, -1)
    return shares.topk(min(count, shares.shape[-1]), -1).indices


def _distances(chosen: Tensor, far: tuple[int, ...], config: AttentionConfig) -> Tensor:
    """By how many positions blocks (C, n, k), in order, are moved to fill the k + 1 places before the window.

    Those that are no far blocks come last and do not count.

    The last k blocks have the places nearest to the window, older ones the furthest; so one may be empty (Section
    3.2.1).
    """
    count = chosen.shape[-1]
    ages = constant(far, chosen.device)[:, None] - chosen
    read = constant(tuple(min(count, number) for number in far), chosen.device)[:, None]
    places = read - constant(range(count), chosen.device) + (ages > config.k)
    return (ages - places) * config.block_size


def _places(x: Tensor, chosen: Tensor, config: AttentionConfig) -> Tensor:
    """The rows of blocks (C, n, k) in a table (C · blocks, ℓ · d) of keys or values (C, capacity, d)."""
    caches, per_cache = len(x), x.shape[1] // config.block_size
    if caches == 1:
        return chosen
    return chosen + constant(range(0, caches * per_cache, per_cache), chosen.device)[:, None, None]


def _copies(x: Tensor, places: Tensor, config: AttentionConfig) -> Tensor:
    """A copy (C, n, k, ℓ, d) of keys or values (C, capacity, d) at these `_places`, on the device of these."""
    table = x.view(-1, config.block_size * x.shape[-1])
    found = table.index_select(0, places.flatten().to(x.device)).to(places.device)
    return found.view(*places.shape, config.block_size, x.shape[-1])


@lru_cache(maxsize=16)
def constant(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A tensor of these numbers, made once for all layers. numbers: a tuple or a range."""
    with torch.inference_mode(False):
        if isinstance(numbers, range):
            return torch.arange(numbers.start, numbers.stop, numbers.step, device=device)
        return torch.tensor(numbers, device=device)


def shares_of_blocks(q: Tensor, text: Text, start: int, lse: Tensor, blocks: Tensor, config: AttentionConfig) -> Tensor:
    """The shares (C, G, T, k) of the queries' attention that the blocks (C, T, k) get.

    lse: (C, G, T), of all that each query reads.
    """
    far = tuple(config.far(position) for position in range(start, start + q.shape[2]))
    together, found = GATHERED.get(q.device.type, GATHERED_ELSEWHERE), []
    step = max(1, together // max(1, len(q) * blocks.shape[2] * config.block_size * q.shape[3]))
    for first in range(0, q.shape[2], step):
        part = slice(first, first + step)
        keys = _copies(text.keys, _places(text.keys, blocks[:, part], config), config)
        if text.rotation is not None:
            keys = text.rotation(keys, _distances(blocks[:, part], far[part], config))
        rows = q[:, :, part].transpose(1, 2) * config.scale
        scores = (
            capped(rows @ keys.flatten(2, 3).mT, config.softcap).to(lse.dtype).unflatten(-1, (-1, config.block_size))
        )
        found.append((scores.logsumexp(-1).transpose(1, 2) - lse[:, :, part, None]).exp())
    return torch.cat(found, 2)
