"""Memory inference against plain loops over the definitions, and the rules that loops do not show."""

import numpy as np
import pytest
import torch

from landmark.attention import ContextMiss, Grouped, Scoring, Sinks, Window, landmark_attention
from landmark.attention.keys import Keys
from landmark.attention.rotary import RotaryTable, rotary_frequencies, rotate
from landmark.memory import Memory
from landmark.memory.positions import Stingy
from landmark.memory.select import Best
from landmark.memory.settings import GRANULARITIES
from landmark.utils.constants import channels_of
from tests import oracle
from tests.memory.reading import feed, new_memory
from tests.pairs import all_pairs, name_of


def is_allowed(case):
    """A second look is of single queries; only landmarks tie."""
    return (
        (case["rerank"] is None or case["granularity"].startswith("per_token_and_"))
        and (case["max_blocks"] is None or case["max_blocks"] >= case["k"])
        and (case["rerank"] is None or case["rerank"] >= case["k"])
        and case["recent"] <= case["k"]
        and not (case["layer"] == 0 and case["landmark"] == "mean")
    )


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
    is_allowed,
    times=2,
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_memory_equals_plain_loops(case):
    """Few blocks, full rings, chunks that end anywhere, ties by construction, grouped heads, lookups dropped."""
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


@pytest.mark.parametrize("gate", [Grouped(), Grouped(0.5), Grouped(1.0)])
def test_reading_all_blocks_at_true_positions_is_whole_window_attention(gate):
    """With k as large as the memory nothing is left out, and up to k blocks the mapping is the true one."""
    q, k, v = (torch.randn(2, 2, 60, 8, dtype=torch.float64) for _ in range(3))
    out = feed(Memory(4, k=12, gate=gate), q, k, v, [17, 1, 22, 20])
    factors = RotaryTable()(0, 60, q)
    expected, _ = landmark_attention(rotate(q, factors), rotate(k, factors), v, Window(4), gate=gate)
    torch.testing.assert_close(out, expected)


def test_stingy_mapping_of_figure_2():
    """k=2 of 5 blocks: the last two keep their places, older ones share slot 0; an empty slot parts old from recent."""
    lags = Stingy().lags(5, 2, 4)
    assert len(lags.distances) == 3
    assert (3 - lags.scoring(torch.tensor([5, 4, 3, 2, 1]))).tolist() == [0, 0, 0, 1, 2]
    for ages, slots in (([4, 1], [0, 2]), ([5, 3], [0, 1]), ([2, 1], [1, 2])):
        assert (3 - lags.attending(torch.tensor(ages))).tolist() == slots
    assert (1 - Stingy().lags(1, 2, 4).attending(torch.tensor([1]))).tolist() == [0]


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


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_under_autocast_types_may_be_mixed(granularity):
    q, k, v = (torch.randn(1, 2, 120, 4) for _ in range(3))
    settings = {"chunks": [40, 60, 20], "extra": ContextMiss(torch.randn(2, 4))}
    with torch.autocast("cpu", torch.bfloat16):
        ours = feed(Memory(5, k=2, select=Best(granularity)), q, k, v.bfloat16(), **settings)
    expected = feed(Memory(5, k=2, select=Best(granularity)), *(x.bfloat16() for x in (q, k, v)), **settings)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


def test_first_layer_is_decided_by_construction():
    """Landmarks equal only up to rounding must not scatter the choice."""
    q, k, v = torch.randn(3, 1, 2, 60, 4, dtype=torch.float32)
    k[:, :, 2::3] = k[:, :, :1]
    noisy = k.clone()
    noisy[:, :, 2::3] *= 1 + 1e-6 * torch.randn(1, 2, 20, 1)
    a, b = (feed(Memory(2, k=3), q, keys, v, [30, 30], layer=0) for keys in (k, noisy))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_oldest_blocks_are_dropped_and_counted():
    memory, x = new_memory(max_blocks=4, k=2), torch.randn(1, 2, 50, 4)
    feed(memory, x, x, x, [25, 25])
    stats = memory.stats
    assert stats["blocks_kept"] == 4
    assert stats["chunks"] == 2
    assert stats["retrievals"] == 2 * 25  # the second chunk's queries, two heads
    assert stats["blocks_retrieved"] == 2 * stats["retrievals"]
    memory.reset()
    assert memory.stats["blocks_kept"] == 0
    assert memory.position == 0


def test_observer_sees_every_retrieval():
    seen, x = [], torch.randn(1, 2, 50, 4)
    feed(Memory(3, k=2, observer=seen.append), x, x, x, [2, 25, 23])
    assert [(each.layer, each.position) for each in seen] == [(1, 0), (1, 2), (1, 27)]
    assert [each.ages.shape[-1] for each in seen] == [0, 0, 2]  # nothing was cached before
    assert seen[2].ages.shape == (1, 2, 23, 2)
    assert int(seen[2].ages.max()) <= 6 <= len(seen[2].store)


def test_attending_twice_without_commit_is_refused():
    memory, x = Memory(3), torch.randn(1, 1, 5, 4)
    memory.attend(0, x, x, x)
    with pytest.raises(RuntimeError, match=r"commit\(\) before the next chunk, or discard\(\) after an error"):
        memory.attend(0, x, x, x)


@pytest.mark.parametrize("settings", [{}, {"keys": Keys(0.5)}, {"tier": "disk"}])
def test_a_chunk_that_failed_midway_is_discarded_and_read_again(settings):
    """As if it had never been: its last key and counts are forgotten."""
    x = torch.randn(1, 1, 12, 4)
    memory, other = new_memory(k=2, **settings), new_memory(k=2, **settings)
    for each in (memory, other):
        for layer in (0, 1):
            each.attend(layer, *[x[:, :, :5]] * 3)
        each.commit()
    memory.attend(0, *[torch.randn(1, 1, 4, 4)] * 3)  # layer 1 is not reached
    memory.discard()
    for layer in (0, 1):
        found, expected = (each.attend(layer, *[x[:, :, 5:]] * 3) for each in (memory, other))
        assert torch.equal(found, expected)
    for each in (memory, other):
        each.commit()
    counts = [name for name in memory.stats if not name.startswith(("seconds", "cache"))]  # what was fetched is there
    assert [memory.stats[name] for name in counts] == [other.stats[name] for name in counts]


@pytest.mark.parametrize("granularity", ["per_token", "per_token_and_group"])
def test_single_tokens_of_heads_that_all_share_keys_are_read(granularity):
    """As in generation with multi-query attention; the retrieved set of a token is that of the whole chunk."""
    q, (k, v) = torch.randn(2, 4, 22, 8, dtype=torch.float64), torch.randn(2, 2, 1, 22, 8, dtype=torch.float64)
    alone = feed(Memory(3, k=2, select=Best(granularity)), q, k, v, [20, 1, 1])
    torch.testing.assert_close(alone, feed(Memory(3, k=2, select=Best(granularity)), q, k, v, [20, 2]))


def test_heads_that_share_keys_share_their_blocks():
    """One set for each key head, whose blocks are read once for the group; two groups still differ."""
    q = torch.randn(1, 4, 120, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 120, 8, dtype=torch.float64)
    seen = []
    memory = Memory(3, k=2, select=Best("per_token_and_group"), observer=seen.append)
    feed(memory, q, k, v, [100, 20])
    ages = seen[1].ages
    assert ages.shape == (1, 2, 20, 2)
    assert (ages[:, 0] != ages[:, 1]).any()
    per_head, _ = seen[1].per_query()
    assert torch.equal(per_head, ages.repeat_interleave(2, 1))
    assert memory.stats["retrievals"] == 2 * 20


def test_selected_samples_take_all_of_theirs_with_them():
    """Blocks, pending tokens and the last key."""
    q, k, v = torch.randn(3, 3, 2, 40, 8, dtype=torch.float64)
    chosen, last = torch.tensor([2, 2, 0]), slice(37, 40)
    memory, other = (new_memory(4, k=2, keys=Keys(0.5)) for _ in range(2))
    feed(memory, *(x[:, :, :37] for x in (q, k, v)), [30, 7])
    feed(other, *(x[chosen, :, :37] for x in (q, k, v)), [30, 7])
    rest = [x[chosen, :, last] for x in (q, k, v)]
    found, expected = (each.attend(1, *rest) for each in (memory.select_samples(chosen), other))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
