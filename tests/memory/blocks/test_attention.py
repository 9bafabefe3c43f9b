"""Attention to chosen blocks of a flat cache, query by query and key by key in float64, and its kernels interpreted."""

import itertools
from dataclasses import replace

import pytest
import torch

from landmark.attention import Scoring, Sinks
from landmark.experiment.evaluation.retrieval import RetrievalStatistics
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
from landmark.memory.blocks.cache import BlockCache, rotate_by
from landmark.memory.blocks.prefill_kernels import read_tiles
from landmark.memory.blocks.scorers.mean_key import Scorer as MeanKey
from landmark.utils.errors import UserError
from tests.memory.blocks.best import Scorer as Best
from tests.pairs import all_pairs, name_of
from tests.tape import Tape

CACHES, HEADS, DIM = 2, 3, 10
FREQUENCIES = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)


def turned(keys, distances):
    """4 of 10 channels do not turn."""
    return rotate_by(FREQUENCIES, keys, distances)


READINGS = {
    "window": [0, 8],
    "k": [2, 3],
    "sinks": [0, 1, 2],
    "tile": [1, 2, 4, 8],
    "place": [(0, 40), (3, 33), (1, 2), (5, 1)],  # behind the covered tokens, and how many
}
SIZES = ("window", "k", "sinks", "tile", "softcap")
MORE = (*SIZES, "scorer", "gates", "alone", "together")
SCORERS = {MeanKey(): lambda keys: keys.mean(0, keepdim=True), Best(): lambda keys: keys}  # and keys that it scores by
SHAPES = all_pairs(
    {
        **READINGS,
        "softcap": [None, 1.5],
        "rotation": [None, turned],
        "scorer": [*SCORERS],
        "gates": [False, True],
        "alone": [False, True],
        "together": [1, CACHES],
    },
    lambda case: case["together"] == 1 or not case["alone"],
)
SHAPES += [  # in which the first tiles have fewer blocks than are read
    SHAPES[0] | {"window": 0, "tile": tile, "place": (0, 12), "rotation": rotation, "alone": alone}
    for tile, rotation, alone in [(1, None, False), (4, None, True), (1, turned, True)]
]
OF_KERNELS = all_pairs(
    {
        **READINGS,
        "place": READINGS["place"][:3],  # one query has no kernel
        "softcap": [None, 1.5],
        "rotation": [None, turned],
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
    }
)


def make(config, place, dtype=torch.float64):
    """Queries, the text, and the position of the first query."""
    generator, start = torch.Generator().manual_seed(0), config.covered + place[0]
    end = -(-(start + place[1]) // config.group) * config.group
    q, keys, values = (
        torch.randn(CACHES, *shape, DIM, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((HEADS, place[1]), (end,), (end,))
    )
    keys[:, start + place[1] :] = values[:, start + place[1] :] = 0  # room behind the end
    blocks = (x.unflatten(1, (-1, config.block_size)) for x in (keys, values))
    return q, Text(keys, values, config.scorer.summarise(*blocks, 0)), start


def by_hand(q, text, start, config):
    """Output, log-sum-exp and blocks (C, T, k), or (C·G, T, k), of each query."""
    size, moved = config.block_size, text.rotation or (lambda keys, _: keys)

    def scores(queries, keys):
        found = queries @ keys.T * config.scale
        return found if config.softcap is None else config.softcap * (found / config.softcap).tanh()

    def block(cache, number, distance):
        keys = text.keys[cache, None, number * size : (number + 1) * size]
        return moved(keys, torch.tensor([max(0, distance) * size]))[0]

    def shares(cache, rows, far, numbers, of_block):
        """The largest share of each block; those of the first blocks before all."""
        logs = [scores(rows, of_block(block(cache, n, far - n - config.k - 1))).logsumexp(-1) for n in numbers]
        found = torch.stack(logs, -1).softmax(-1).amax(0)
        return [float("inf") if n < config.sinks else share for n, share in zip(numbers, found.tolist(), strict=True)]

    def best(cache, head, query):
        """The blocks that this query reads, with the queries, heads and caches with which it chooses."""
        position = start + query
        tile = range(position // config.tile * config.tile, position // config.tile * config.tile + config.tile)
        own = [other - start for other in tile if 0 <= other - start < q.shape[2]]
        heads = [head] if config.alone else range(q.shape[1])
        numbers = range(far := config.far(position))
        found = [
            shares(each, q[each, heads][:, own].flatten(0, 1), far, numbers, SCORERS[config.scorer])
            for each in (range(len(q)) if config.together > 1 else [cache])
        ]
        found = [max(each) for each in zip(*found, strict=True)]
        return sorted(n for _, n in sorted(zip(found, numbers, strict=True), reverse=True)[: config.k])

    out, lse, chosen = torch.empty_like(q), q.new_empty(q.shape[:3]), []
    most = config.far(start + q.shape[2] - 1)  # with gates earlier tiles may have fewer blocks than are read
    for cache, head in itertools.product(range(len(q)), range(q.shape[1])):
        for query in range(q.shape[2]):
            position, far = start + query, config.far(start + query)
            numbers = best(cache, head, query)
            near = slice(position // config.group * config.group - config.window, position + 1)
            own = q[cache, head, query]
            found = scores(own, text.keys[cache, near])
            outs, levels = [found.softmax(-1) @ text.values[cache, near]], [found.logsumexp(-1)]
            for place, number in enumerate(numbers):
                age = far - number
                keys = block(cache, number, age - (len(numbers) - place) - (age > config.k))
                found = scores(own, keys)
                gate = scores(own, SCORERS[config.scorer](keys)) if config.gates else found
                outs.append(found.softmax(-1) @ text.values[cache, number * size : (number + 1) * size])
                levels.append(gate.logsumexp(-1))
            levels = torch.stack(levels, -1)
            out[cache, head, query] = (levels.softmax(-1)[..., None] * torch.stack(outs, -2)).sum(-2)
            lse[cache, head, query] = levels.logsumexp(-1)
            chosen.append(numbers + [0] * (min(config.k, most) - len(numbers)))
    chosen = torch.tensor(chosen).view(*q.shape[:3], -1)
    return out, lse, chosen.flatten(0, 1) if config.alone else chosen[:, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_queries_read_what_they_choose(shape):
    config = AttentionConfig(4, scale=0.4, **{name: shape[name] for name in MORE})
    q, text, start = make(config, shape["place"])
    if shape["rotation"] is not None:
        text = text._replace(rotation=turned, rotated=rotated_summaries(text.summaries, 0, turned, config))
    expected = by_hand(q, text, start, config)
    found = read_chosen(q, text, start, config)
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-12)
    blocks = blocks_of_queries(found[2], start, q, config)
    if not config.gates:
        assert torch.equal(blocks.sort(-1).values, expected[2])
    if config.alone:
        return
    shares = shares_of_blocks(q, text, start, found[1], blocks, config)
    assert config.gates or (shares.sum(-1) < 1).all()
    assert (shares > 0).all()


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("granularity", ["per_token_and_group", "per_token_and_head", "per_token", "per_head"])
def test_an_observer_counts_the_distinct_blocks_of_a_chunk(granularity, gates):
    """As loops do over the blocks that each query reads, with the paper's scores; of two samples."""
    alone, size = granularity in ("per_token_and_head", "per_head"), 4
    config = AttentionConfig(size, 8, 3, 1, 4 if granularity == "per_head" else 1, gates=gates, alone=alone)
    config = replace(config, scale=0.4, together=CACHES if granularity == "per_token" else 1)
    start, length, counts, pairs = 48, 13, [0] * (config.far(60) + 1), 0
    seen = RetrievalStatistics(start, length)
    memory = BlockCache(size, 3, window=8, first=1, dense=0, gates=gates, granularity=granularity, observer=seen)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 64, DIM, generator=draw).double() for heads in (6, 2, 2))
    for stop in (start, start + length, 64):
        memory.attend(0, *(x[:, :, memory.position : stop] for x in (q, k, v)), Scoring(0.4))
        memory.commit()
    for sample in range(2):
        keys, values = k[sample], v[sample]
        text = Text(keys, values, keys.unflatten(1, (-1, size)).mean(2, keepdim=True))
        blocks = by_hand(q[sample, :, start : start + length].unflatten(0, (2, 3)), text, start, config)[2]
        read = blocks.unflatten(0, (2, -1)).flatten(1)  # of each cache
        counts[len(read.unique())] += 1
        pairs += sum(len(each.unique()) for each in read)
    found = seen.summary()
    assert (found["samples"], found["blocks_cached"]) == (2, config.far(60))
    assert found["layers"] == [{"distinct_blocks": counts, "bytes_moved": pairs / 2 * 2 * size * DIM * 8}]


def test_a_chunk_that_is_read_in_two_ways_is_not_counted():
    given = {"observer": RetrievalStatistics(0, 60), "frequencies": torch.tensor([1.0]), "positions": 52}
    x = torch.randn(1, 1, 60, 8)
    with pytest.raises(UserError, match="the chunk at position 0 is read in another way from 24 on"):
        BlockCache(4, 3, window=8, dense=0, **given).attend(0, x, x, x, Scoring())


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("place", [(0, 30), (5, 1)])
def test_with_log_sum_exps_as_gates_the_grouped_softmax_is_the_plain_one(window, place):
    config = AttentionConfig(4, window, 99, scale=0.4, softcap=1.5, scorer=Best(), gates=True)
    q, text, start = make(config, place)
    found, expected = read_chosen(q, text, start, config), read_all(q, text, start, config)
    torch.testing.assert_close(found[:2], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("start", "count"), [(0, 9), (5, 9), (5, 1)])
def test_all_keys(start, count, softcap):
    config = AttentionConfig(4, 8, 2, scale=0.4, softcap=softcap)
    q, text, _ = make(config, (start - config.covered, count))
    out, lse = read_all(q, text, start, config)
    scores = torch.einsum("cgtd,csd->cgts", q, text.keys[:, : start + count]) * 0.4
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(torch.ones(count, start + count).triu(start + 1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(out, scores.softmax(-1) @ text.values[:, None, : start + count], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", OF_KERNELS, ids=name_of)
def test_kernels(shape):
    """Interpreted, against the plain computation of the same rounded numbers."""
    dtype = shape["dtype"]
    config = AttentionConfig(4, scale=0.4, **{name: shape[name] for name in SIZES})
    q, text, start = make(config, shape["place"], dtype)
    if shape["rotation"] is not None:
        rotated, factors = (
            rotated_summaries(text.summaries, 0, turned, config),
            block_rope_factors(FREQUENCIES, 1 + text.summaries.shape[1], 4),
        )
        text = text._replace(rotation=turned, rotated=rotated, factors=factors)
    exact = text._replace(keys=text.keys.float(), values=text.values.float())
    expected = read_chosen(q.float(), exact, start, config)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        found = read_chosen(q, text, start, replace(config, tiles_by=read_tiles))
    finally:
        torch.use_deterministic_algorithms(False)
    ours, theirs = (blocks_of_queries(x[2], start, q, config).sort(-1).values for x in (found, expected))
    same = (ours == theirs).all(-1)[:, None].expand(found[1].shape)
    assert same.float().mean() > 0.98  # a near tie may fall to either side
    bound = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (found[0].float() - expected[0])[same].abs().max() < bound
    bound = 5e-6 if shape["rotation"] is None else bound  # moved keys are rounded
    assert (found[1] - expected[1])[same].abs().max() < bound


def test_operators_of_a_token():
    """So many in a layer, of which two write the key and the value, however long the text is."""
    memory = BlockCache(4, 3, window=8, dense=0)
    memory.expect(200)
    q, k, v = (torch.randn(1, heads, 150, 8, dtype=torch.bfloat16) for heads in (6, 2, 2))
    for part in (slice(0, 82), slice(82, 83), slice(83, 149), slice(149, 150)):
        for layer in range(2):  # what is made once for all layers, the first one makes
            with (tape := Tape(waits=True)).capture():
                memory.attend(layer, q[:, :, part], k[:, :, part], v[:, :, part], Scoring())
        memory.commit()
        assert part.stop - part.start > 1 or len(tape.operators) <= 14


def test_a_discarded_chunk_leaves_nothing():
    """Nor do its blocks' means at the places of far blocks, which are kept from chunk to chunk."""
    settings = {"window": 4, "dense": 0, "mapping": "stingy", "frequencies": torch.tensor([1.0, 0.3])}
    found, expected = (BlockCache(4, 2, **settings) for _ in range(2))
    q, k, v = (torch.randn(1, heads, 60, 8, dtype=torch.float64) for heads in (2, 1, 1))

    def read(memory, start, stop, like=1):
        return memory.attend(0, q[:, :, start:stop], like * k[:, :, start:stop], v[:, :, start:stop], Scoring())

    for memory in (found, expected):
        read(memory, 0, 30)
        memory.commit()
    read(found, 30, 50, like=-1)
    found.discard()
    assert torch.equal(read(found, 30, 60), read(expected, 30, 60))


TOKENS = all_pairs(
    {
        "heads": [(2, 1, 1), (1, 2, 3)],  # samples, caches of each, and queries of a cache
        "window": [0, 8],
        "k": [2, 3],
        "first": [0, 1],
        "dense": [0, 45],
        "mapping": ["true", "stingy", "auto"],
        "softcap": [None, 1.5],
        "dtype": [torch.float32, torch.float16],
    }
)


@pytest.mark.parametrize("shape", TOKENS, ids=name_of)
def test_kernels_of_a_token(shape, monkeypatch):
    """Interpreted, token by token, against a memory without kernels that reads the same rounded numbers."""
    (batch, caches, group), exact = shape["heads"], shape["dtype"] == torch.float32
    settings = {name: shape[name] for name in ("k", "window", "first", "dense", "mapping")}
    settings |= {"positions": 52, "frequencies": torch.tensor([1.0, 0.3, 0.05])}
    found, expected = BlockCache(4, **settings), BlockCache(4, **settings)
    generator, scoring = torch.Generator().manual_seed(0), Scoring(0.4, shape["softcap"])
    heads = caches * group, caches, caches
    q, k, v = (torch.randn(batch, n, 62, DIM, generator=generator).to(shape["dtype"]) for n in heads)
    sinks = Sinks(torch.randn(caches * group, generator=generator)) if shape["first"] == 1 else None

    def read(memory, part, kernels, dtype):
        monkeypatch.setattr("landmark.memory.blocks.cache.has_kernels", lambda *_: kernels and len(part) == 1)
        given = (x[:, :, part].to(dtype) for x in (q, k, v))
        out = memory.attend(0, *given, scoring, sinks)
        memory.commit()
        return out

    monkeypatch.setattr("landmark.memory.blocks.decode_kernels.BLOCKS", 8)  # so that programs share the means
    monkeypatch.setattr("landmark.memory.blocks.decode_kernels.splits_of", lambda *_: 4)  # and the keys
    near = []
    for part in ([*range(42)], *([at] for at in range(42, 62))):
        out = read(found, part, True, shape["dtype"])
        near.append((out - read(expected, part, False, torch.float32)).abs().max() < (1e-5 if exact else 5e-3))
    assert sum(near) >= len(near) - (not exact)  # a near tie may fall to either side
    for ours, other in zip(found.layers[0].tensors, expected.layers[0].tensors, strict=True):
        torch.testing.assert_close(ours[:, :15].float(), other[:, :15], rtol=0, atol=1e-6)


def test_launches(monkeypatch):
    """Of kernels, the sorting and the copies, in a layer: of a chunk of whole blocks, and of a token."""
    monkeypatch.setattr("landmark.memory.blocks.cache.has_kernels", lambda *_: True)
    memory, counts = BlockCache(4, 3, window=8, dense=0), []
    q, k, v = (torch.randn(1, heads, 75, 8, dtype=torch.float16) for heads in (6, 2, 2))
    memory.expect(75)
    for part in (slice(0, 40), slice(40, 72), slice(72, 74), slice(74, 75)):
        memory.begin(part == slice(40, 72))
        for layer in range(2):  # what is made once for all layers, the first one makes
            with (tape := Tape(waits=True)).capture():
                memory.attend(layer, *(x[:, :, part] for x in (q, k, v)), Scoring())
        memory.commit()
        counts.append(len(tape.launches))
    assert counts[1] <= 12
    assert counts[3] <= 7
