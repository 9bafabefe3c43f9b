"""Memory inference against plain loops over the definitions, and the rules that loops do not show."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import ContextMiss, Grouped, Scoring, Sinks
from landmark.attention.keys import Keys
from landmark.attention.rotary import rotary_frequencies
from landmark.memory import Memory, SinkMemory
from landmark.memory.landmarks.block_store import BlockStore
from landmark.memory.landmarks.select import Best, Given, MeanKeys, Newest, scores, selector
from landmark.memory.landmarks.settings import GRANULARITIES
from landmark.utils.constants import channels_of
from tests import oracle
from tests.memory.reading import feed, new_memory, texts
from tests.pairs import all_pairs, name_of

CASES = all_pairs(
    {
        "chunks": [(7, 1, 9, 14), (1, 1, 2, 13, 6), (12, 12)],
        "block_size": [1, 2, 4],
        "k": [0, 1, 3],
        "max_blocks": [None, 3, 5],
        "granularity": GRANULARITIES,
        "rerank": [None, 3, 5],
        "heads": [(1, 1), (4, 2), (2, 1)],
        "layer": [0, 1],  # in the first layer all landmarks are one vector
        "mapping": ["stingy", "true"],
        "landmark": ["token", "mean"],
        "offset": [0.0, 0.5],
        "rotary": [1.0, 0.5],
        "extra": [None, 0.0, 0.4, "sinks"],  # numbers: a context miss token with this cutoff
        "alpha": [0.0, 0.5, 1.0],
        "softcap": [None, 1.5],
    },
    lambda case: (  # a second look is of single queries; only landmarks tie
        (case["rerank"] is None or case["granularity"].startswith("per_token_and_"))
        and (case["max_blocks"] is None or case["max_blocks"] >= case["k"])
        and (case["rerank"] is None or case["rerank"] >= case["k"])
        and not (case["layer"] == 0 and case["landmark"] == "mean")
    ),
    times=2,
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_memory_equals_plain_loops(case):
    generator = torch.Generator().manual_seed(0)
    (heads, kv_heads), total, block_size = case["heads"], sum(case["chunks"]), case["block_size"]
    q = torch.randn(1, heads, total, 4, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 1, kv_heads, total, 4, dtype=torch.float64, generator=generator)
    place = torch.randn(heads, 4, dtype=torch.float64, generator=generator)
    if case["layer"] == 0:
        landmarks = k[:, :, block_size :: block_size + 1]  # one vector but for rounding, which must not decide
        rounding = 1e-13 * torch.randn(*landmarks.shape[:3], 1, dtype=torch.float64, generator=generator)
        landmarks[:] = k[:, :, :1] * (1 + rounding)
    has_cmt, extra = isinstance(case["extra"], float), None
    if case["extra"] is not None:
        extra = ContextMiss(place[:kv_heads]) if has_cmt else Sinks(place[:, 0])
    names = "k", "max_blocks", "granularity", "rerank", "mapping"
    memory = new_memory(
        block_size,
        **{name: case[name] for name in names},
        cutoff=case["extra"] if has_cmt else 0.0,
        keys=Keys(case["offset"], case["landmark"], rotary_frequencies(4, 10000.0, case["rotary"])),
        gate=Grouped(case["alpha"]),
        scoring=Scoring(None, case["softcap"]),
    )
    out = feed(memory, q, k, v, case["chunks"], layer=case["layer"], extra=extra)

    wide_k, wide_v = (x[0].repeat_interleave(heads // kv_heads, 0).numpy() for x in (k, v))
    channels = channels_of(case["offset"], 4)
    wide_k = np.stack([oracle.offset_keys(keys, channels, block_size) for keys in wide_k])
    reader = oracle.Memory(
        block_size,
        oracle.Selector(case["k"], case["granularity"], case["rerank"]),
        max_blocks=case["max_blocks"],
        true_positions=case["mapping"] == "true",
        tied=case["layer"] == 0 and case["mapping"] == "stingy",
        mean=1 - case["alpha"] if case["landmark"] == "mean" else 0.0,
        rotary_fraction=case["rotary"],
        score=oracle.score_by(None, case["softcap"]),
        alpha=case["alpha"],
        cmt=place[:kv_heads].repeat_interleave(heads // kv_heads, 0).numpy() if has_cmt else None,
        cutoff=case["extra"] if has_cmt else 0.0,
        sinks=place[:, 0].numpy() if case["extra"] == "sinks" else None,
        kv_heads=kv_heads,
    )
    expected = reader.read(q[0].numpy(), wide_k, wide_v, list(case["chunks"]))
    np.testing.assert_allclose(out[0], expected, atol=1e-10)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_half_precision_retrieves_what_exact_scores_of_its_numbers_choose(granularity):
    """Chunks of 40 queries choose 4 of up to 160 blocks, as the same numbers do in float64."""
    chosen = {}
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 640, 16, generator=generator).bfloat16() for _ in range(3))
    for dtype in (torch.bfloat16, torch.float64):
        chosen[dtype] = []
        memory = Memory(3, select=Best(granularity), observer=lambda seen, into=chosen[dtype]: into.append(seen.ages))
        feed(memory, q.to(dtype), k.to(dtype), v.to(dtype), [40] * 16)
    different = [(a != b).any(-1) for a, b in zip(chosen[torch.bfloat16], chosen[torch.float64], strict=True)]
    assert torch.cat([x.flatten() for x in different]).float().mean() < 0.002  # rounded scores: 0.1 to 0.5
    settings = {"chunks": [40, 60, 20], "extra": ContextMiss(torch.randn(2, 16))}
    with torch.autocast("cpu", torch.bfloat16):  # types may be mixed
        ours = feed(Memory(5, k=2, select=Best(granularity)), q.float(), k.float(), v, **settings)
    expected = feed(Memory(5, k=2, select=Best(granularity)), q, k, v, **settings)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("granularity", "sets"), [*zip(GRANULARITIES, [(4, 23), (2, 23), (4, 1), (1, 23)], strict=True)], ids=GRANULARITIES
)
def test_an_observer_sees_every_retrieval_and_counts_are_of_sets(granularity, sets):
    """Of 4 query heads that share 2 heads of keys; the oldest blocks are dropped, and counted."""
    seen, x = [], torch.randn(1, 4, 50, 4)
    memory = new_memory(max_blocks=4, k=2, granularity=granularity, observer=seen.append)
    feed(memory, x, x[:, :2], x[:, :2], [2, 25, 23])
    assert [(each.layer, each.position) for each in seen] == [(1, 0), (1, 2), (1, 27)]
    assert [each.ages.shape[-1] for each in seen] == [0, 0, 2]  # nothing was cached before
    assert seen[2].ages.shape == (1, *sets, 2)
    assert int(seen[2].ages.max()) <= 4 == len(seen[2].store)
    assert seen[2].per_query()[0].shape == (1, 4, 23, 2)
    stats = memory.stats
    assert (stats["blocks_kept"], stats["chunks"], stats["retrievals"]) == (4, 3, sets[0] * sets[1])
    assert stats["blocks_retrieved"] == 2 * stats["retrievals"]
    memory.reset()
    assert memory.stats["blocks_kept"] == memory.position == 0


def explicit(q, k, v, chunks, sinks, window):
    """q, k, v (T, d), one head, not rotated: every key has a place in the cache, or is masked."""
    out, start = np.zeros_like(q), 0
    for size in chunks:
        stop = start + size
        visible = [j for j in range(stop) if j < sinks or j >= start or j >= max(sinks, start - window)]
        place = {j: number for number, j in enumerate(visible)}
        for i in range(start, stop):
            own = oracle.rotate(q[i], place[i])
            tokens = [(oracle.SCORE(own, oracle.rotate(k[j], place[j])), v[j]) for j in visible if j <= i]
            out[i] = oracle.mean_of(tokens)
        start = stop
    return out


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=40)
def test_sinks_equal_an_explicit_masked_softmax(chunks, sinks, window, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, sum(chunks), 4, dtype=torch.float64, generator=generator) for _ in range(3))
    memory = SinkMemory(window, sinks)
    out = feed(memory, q, k, v, chunks)
    for sample in range(2):
        for head in range(2):
            expected = explicit(*(x[sample, head].numpy() for x in (q, k, v)), chunks, sinks, window)
            np.testing.assert_allclose(out[sample, head], expected, atol=1e-10)
    kept = min(sum(chunks), sinks + window)
    assert memory.stats == {"keys_kept": kept, "bytes_kept": 2 * 2 * 2 * kept * 4 * 8}
    memory.reset()
    assert memory.stats == {"keys_kept": 0, "bytes_kept": 0}
    with pytest.raises(ValueError, match="sinks"):
        SinkMemory(8, sinks=-1)


# ---- what each selector is for; that it follows its definition is tested above, for every pair of settings


WIDTH = 4


@pytest.mark.parametrize(
    ("select", "is_alike", "found"),
    [(MeanKeys(), True, True), (Best(), True, False), (Newest(), True, False), (MeanKeys(), False, False)],
)
def test_a_block_is_found_by_its_tokens_where_landmarks_say_nothing(select, is_alike, found):
    """Twelve blocks, the third of which has the value 1; the mean of its keys says what is looked for, or nothing. In
    the first layer all landmarks tie."""
    q, k, v = torch.zeros(3, 1, 1, 12 * WIDTH, 8, dtype=torch.float64)
    q[..., -2:] = 5.0  # the slowest pair: nearly the same at every position
    of_third = torch.tensor([5.0, 5.0, 5.0] if is_alike else [5.0, -6.0, 0.0])
    k[0, 0, 2 * WIDTH : 2 * WIDTH + 3, -2:] = of_third[:, None].double()
    v[:, :, 2 * WIDTH : 2 * WIDTH + 3, 0] = 1.0
    for layer in (0, 1):
        out = feed(Memory(3, k=1, select=select), q, k, v, [10 * WIDTH, 2 * WIDTH], layer=layer)
        assert bool(out[:, :, 10 * WIDTH :, 0].max() > 0.1) == found


@pytest.mark.parametrize(("granularity", "heads", "queries"), [("per_token_and_head", 2, 10), ("per_head", 2, 1)])
def test_given_blocks_come_first_then_the_newest(granularity, heads, queries):
    seen, (q, k, v) = [], torch.randn(3, 2, 2, 40, 8)
    select = Given(granularity, torch.tensor([[1, -1], [0, 5]]))
    feed(Memory(4, k=3, select=select, observer=lambda each: seen.append(each.ages)), q, k, v, [30, 10], layer=0)
    ages = seen[-1]  # of six blocks: block number n has age 6 − n
    assert ages.shape == (2, heads, queries, 3)
    assert (ages[0] == torch.tensor([5, 2, 1])).all()
    assert (ages[1] == torch.tensor([6, 2, 1])).all()  # block 5 is the newest itself
    select.numbers = torch.tensor([[9], [9]])  # blocks that are not stored do not count
    feed(Memory(4, k=2, select=select, observer=lambda each: seen.append(each.ages)), q, k, v, [30, 10])
    assert (seen[-1] == torch.tensor([2, 1])).all()
    with pytest.raises(RuntimeError, match="set its `numbers`"):
        feed(Memory(4, select=Given()), q, k, v, [30, 10])


@given(st.integers(2, 3000), st.integers(1, 9), st.integers(0, 5), st.integers(0, 1000))
def test_the_best_are_found_and_of_equal_ones_the_newer(blocks, count, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, 2, blocks, generator=generator)
    drawn = (drawn * steps).round() / 2 if steps else drawn  # many ties; 0 and -0 among them
    drawn[0, 0, 0] = -torch.inf
    ages, count = torch.randperm(blocks, generator=generator) + 1, min(count, blocks - 1)
    order = sorted(range(blocks), key=lambda n: (-float(drawn[1, 0, n]), int(ages[n])))
    ours = scores.best_ages(drawn, ages, count).sort(-1).values
    assert ours[1, 0].tolist() == sorted(int(ages[n]) for n in order[:count])


# ---- queries below the cutoff of the context miss token are not searched for, and read no blocks


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_single_queries_and_chunks_below_the_cutoff_are_left_out(granularity):
    """The token's key points along some queries and away from others, so it is known which queries retrieve."""
    q, k, v, _ = texts(60, (4, 4), dtype=torch.float64)
    q[..., -2:] = -50.0  # the slowest pair: about the same at every position
    q[:, :, 40:, -2:] = 0.0
    q[0, 1, 20:27, -2:] = 50.0
    q[1, 3, 22, -2:] = 50.0
    k[..., -2:] = 0.0
    cmt, seen = torch.zeros(4, 4, dtype=torch.float64), []
    cmt[:, -2:] = 5.0
    memory = new_memory(k=2, granularity=granularity, cutoff=0.99, observer=seen.append)
    fetch, landmarks = (
        mock.patch.object(BlockStore, name, autospec=True, side_effect=getattr(BlockStore, name))
        for name in ("fetch", "read_landmarks")
    )
    scan = mock.patch.object(selector, "best_of_summaries", wraps=selector.best_of_summaries)
    with fetch as fetched, landmarks as scored, scan as scans:
        feed(memory, q, k, v, [20, 20, 20], extra=ContextMiss(cmt))
    stats, reads = memory.stats, [2 * len(call.args[1]) for call in fetched.call_args_list]
    reads += [len(call.args[1]) for call in scored.call_args_list]
    assert (stats["lookups"], stats["searches"], stats["searches_skipped"], scans.call_count) == (8, 2, 1, 1)
    assert (stats["dropped"], stats["possible"]) == ([[80, 73, 80, 79]], [[80] * 4])
    assert stats["drop_rates"] == [[1.0, 73 / 80, 1.0, 79 / 80]]
    assert stats["drop_rate"] == pytest.approx(1 - 8 / 320)
    assert 0 < sum(reads) <= 3 * 2 * 8, "at most the blocks of eight queries: keys, values and landmark"
    assert stats["retrievals"] == (2 if granularity == "per_head" else 8)
    assert sum(int((each.ages > 0).sum()) for each in seen) == stats["blocks_retrieved"]
    assert sum(int((each.per_query()[0] > 0).any(-1).sum()) for each in seen) == stats["lookups"]
