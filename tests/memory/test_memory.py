"""Memory inference against plain loops over the definitions, and the rules that loops do not show."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import ContextMiss, Grouped, Scoring, Sinks
from landmark.attention.keys import Keys
from landmark.attention.rotary import rotary_frequencies
from landmark.memory import Memory, SinkMemory
from landmark.memory.select import Best
from landmark.memory.settings import GRANULARITIES
from landmark.utils.constants import channels_of
from tests import oracle
from tests.memory.reading import feed, new_memory
from tests.pairs import all_pairs, name_of

CASES = all_pairs(
    {
        "chunks": [(7, 1, 9, 14), (1, 1, 2, 13, 6), (12, 12)],
        "block_size": [1, 2, 4],
        "k": [0, 1, 3],
        "max_blocks": [None, 3, 5],
        "granularity": GRANULARITIES,
        "rerank": [None, 3, 5],
        "recent": [0, 1],
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
        and case["recent"] <= case["k"]
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
        k[:, :, block_size :: block_size + 1] = k[:, :, :1]
    has_cmt, extra = isinstance(case["extra"], float), None
    if case["extra"] is not None:
        extra = ContextMiss(place[:kv_heads]) if has_cmt else Sinks(place[:, 0])
    names = "k", "max_blocks", "granularity", "rerank", "recent", "mapping"
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
        oracle.Selector(case["k"], case["granularity"], case["rerank"], case["recent"]),
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


def test_first_layer_is_decided_by_construction():
    """Landmarks equal only up to rounding must not scatter the choice."""
    q, k, v = torch.randn(3, 1, 2, 60, 4, dtype=torch.float32)
    k[:, :, 2::3] = k[:, :, :1]
    noisy = k.clone()
    noisy[:, :, 2::3] *= 1 + 1e-6 * torch.randn(1, 2, 20, 1)
    a, b = (feed(Memory(2, k=3), q, keys, v, [30, 30], layer=0) for keys in (k, noisy))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


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


def test_selected_samples_take_all_of_theirs_with_them():
    q, k, v = torch.randn(3, 3, 2, 40, 8, dtype=torch.float64)
    chosen, last = torch.tensor([2, 2, 0]), slice(37, 40)
    memory, other = (new_memory(4, k=2, keys=Keys(0.5)) for _ in range(2))
    feed(memory, *(x[:, :, :37] for x in (q, k, v)), [30, 7])
    feed(other, *(x[chosen, :, :37] for x in (q, k, v)), [30, 7])
    rest = [x[chosen, :, last] for x in (q, k, v)]
    found, expected = (each.attend(1, *rest) for each in (memory.select_samples(chosen), other))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


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
