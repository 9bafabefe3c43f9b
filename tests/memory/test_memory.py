"""Memory inference against plain loops over the definitions, and the rules that loops do not show."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention.rotary import rotary_frequencies
from landmark.memory import Memory
from landmark.memory.positions import attending_lag, scoring_lag, slots
from landmark.memory.settings import GRANULARITIES, LANDMARK_KEYS, MAPPINGS, check_settings
from landmark.utils.channels import channels_of
from landmark.utils.errors import UserError
from tests import naive


def feed(memory, q, k, v, chunks, layer=1, **settings):
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        outs.append(memory.attend(layer, q[:, :, part], k[:, :, part], v[:, :, part], **settings))
        memory.commit()
        start += size
    return torch.cat(outs, 2)


@st.composite
def readings(draw):
    k, has_cmt, landmark_key = draw(st.integers(0, 4)), draw(st.booleans()), draw(st.sampled_from(LANDMARK_KEYS))
    can_cap = not has_cmt and landmark_key == "token"
    granularity = draw(st.sampled_from(GRANULARITIES))
    can_rerank, block_size = granularity == "per_token_and_head", draw(st.integers(1, 5))
    return {
        "chunks": draw(st.lists(st.integers(1, 14), min_size=1, max_size=6)),
        "block_size": block_size,
        "k": k,
        "max_blocks": draw(st.one_of(st.none(), st.integers(max(k, 1), 9))),
        "granularity": granularity,
        "rerank": draw(st.one_of(st.none(), st.integers(max(k, 1), 8))) if can_rerank else None,
        "recent": draw(st.integers(0, k)),
        "query_window": 1 if has_cmt else draw(st.integers(1, block_size)),
        "heads": draw(st.sampled_from([(1, 1), (2, 2), (4, 2)])),
        "tie": draw(st.booleans()),
        "cmt": has_cmt,
        "joint_softmax": 0.0 if has_cmt else draw(st.sampled_from([0.0, 0.5, 1.0])),
        "cutoff": draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0])),
        "mapping": draw(st.sampled_from(MAPPINGS)),
        "key_offset": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "rotary_fraction": draw(st.sampled_from([0.5, 1.0])),
        "landmark_key": landmark_key,
        "softcap": draw(st.one_of(st.none(), st.floats(1, 3))) if can_cap else None,
        "local_blocks": draw(st.sampled_from([0, 0, 1, 2])),
        "seed": draw(st.integers(0, 1000)),
    }


@given(readings())
@settings(max_examples=120, deadline=None)
def test_memory_equals_plain_loops(reading):
    """Few blocks, full rings, chunks that end anywhere, ties by construction, grouped heads, lookups dropped."""
    generator = torch.Generator().manual_seed(reading["seed"])
    heads, kv_heads = reading["heads"]
    total = sum(reading["chunks"])
    fraction = 0.5 if reading["landmark_key"] == "pooled" else reading["rotary_fraction"]  # a bias must not turn
    q = torch.randn(2, heads, total, 4, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(2, kv_heads, total, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    memory = Memory(
        reading["block_size"],
        max_blocks=reading["max_blocks"],
        k=reading["k"],
        granularity=reading["granularity"],
        tie_layers=(1,) if reading["tie"] else (),
        cutoff=reading["cutoff"],
        mapping=reading["mapping"],
        key_offset=reading["key_offset"],
        landmark_key=reading["landmark_key"],
        local_blocks=reading["local_blocks"],
        softcap=reading["softcap"],
        rerank=reading["rerank"],
        recent=reading["recent"],
        query_window=reading["query_window"],
        joint_softmax=reading["joint_softmax"],
        rope_base=rotary_frequencies(4, 10000.0, fraction),
    )
    cmt = torch.randn(kv_heads, 4, dtype=torch.float64, generator=generator) if reading["cmt"] else None
    if reading["tie"]:  # as in layer 0: every landmark's key is the same
        width = reading["block_size"] + 1
        k[:, :, reading["block_size"] :: width] = k[:, :, :1]
    out = feed(memory, q, k, v, reading["chunks"], cmt=cmt)
    wide_cmt = None if cmt is None else cmt.repeat_interleave(heads // kv_heads, 0).numpy()
    channels = channels_of(reading["key_offset"], 4)
    if channels:
        for each in k.flatten(0, 1):
            each[:] = torch.from_numpy(naive.offset_keys(each.numpy(), channels, reading["block_size"]))
    for sample in range(2):
        wide_k, wide_v = (x[sample].repeat_interleave(heads // kv_heads, 0).numpy() for x in (k, v))
        expected = naive.memory_attention(
            q[sample].numpy(),
            wide_k,
            wide_v,
            reading["chunks"],
            reading["block_size"],
            reading["k"],
            reading["max_blocks"],
            reading["granularity"],
            reading["tie"] and reading["mapping"] == "stingy",
            wide_cmt,
            reading["cutoff"],
            reading["mapping"],
            landmark_key=reading["landmark_key"],
            rotary_fraction=fraction,
            local_blocks=reading["local_blocks"],
            kv_heads=kv_heads,
            softcap=reading["softcap"],
            rerank=reading["rerank"],
            recent=reading["recent"],
            query_window=reading["query_window"],
            joint_softmax=reading["joint_softmax"],
            pooling=q[sample].unflatten(0, (kv_heads, -1)).mean(1).repeat_interleave(heads // kv_heads, 0).numpy(),
        )
        np.testing.assert_allclose(out[sample], expected, atol=1e-10)


def test_reading_all_blocks_at_true_positions_is_whole_window_attention():
    """With k as large as the memory nothing is left out, and up to k blocks the mapping is the true one."""
    from landmark.attention import landmark_attention
    from landmark.attention.rotary import RotaryTable, rotate

    q, k, v = (torch.randn(2, 2, 60, 8, dtype=torch.float64) for _ in range(3))
    out = feed(Memory(4, k=12), q, k, v, [17, 1, 22, 20])
    factors = RotaryTable()(0, 60, q)
    expected = landmark_attention(rotate(q, factors), rotate(k, factors), v, block_size=4)
    torch.testing.assert_close(out, expected)


def test_stingy_mapping_of_figure_2():
    """k=2 of 5 blocks: the last two keep their places, older ones share slot 0; an empty slot parts old from recent."""
    assert slots(5, 2) == 3
    ages = torch.tensor([5, 4, 3, 2, 1])
    assert (3 - scoring_lag(ages, 2, 3)).tolist() == [0, 0, 0, 1, 2]
    assert (3 - attending_lag(torch.tensor([4, 1]), 2, 3)).tolist() == [0, 2]
    assert (3 - attending_lag(torch.tensor([5, 3]), 2, 3)).tolist() == [0, 1]
    assert (3 - attending_lag(torch.tensor([2, 1]), 2, 3)).tolist() == [1, 2]
    assert (1 - attending_lag(torch.tensor([1]), 2, slots(1, 2))).tolist() == [0]


def test_equal_scores_are_taken_by_recency():
    """All landmarks the same and all at one slot: the newest of the old win, at every granularity."""
    for granularity in GRANULARITIES:
        memory = Memory(2, k=1, granularity=granularity, tie_layers=())
        q = torch.randn(1, 2, 30, 4, dtype=torch.float64)
        k, v = torch.randn(2, 1, 2, 30, 4, dtype=torch.float64)
        k[:, :, 2::3] = 0.0  # every landmark scores 0 for every query
        feed(memory, q, k, v, [15, 15])
        same = feed(Memory(2, max_blocks=1, k=1, granularity=granularity, tie_layers=()), q, k, v, [15, 15])
        recent = feed(Memory(2, k=1, granularity=granularity, scorer="recent"), q, k, v, [15, 15])
        torch.testing.assert_close(same, recent)
        torch.testing.assert_close(
            feed(Memory(2, k=1, granularity=granularity, tie_layers=()), q, k, v, [15, 15]), recent
        )


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_half_precision_retrieves_what_exact_scores_of_its_numbers_choose(granularity):
    """Chunks of 40 queries choose 4 of up to 160 blocks, as the same numbers do in float64."""
    chosen = {}
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 640, 16, generator=generator).bfloat16() for _ in range(3))
    for dtype in (torch.bfloat16, torch.float64):
        chosen[dtype] = []
        memory = Memory(3, granularity=granularity, observer=lambda seen, into=chosen[dtype]: into.append(seen.ages))
        feed(memory, q.to(dtype), k.to(dtype), v.to(dtype), [40] * 16)
    different = [(a != b).any(-1) for a, b in zip(chosen[torch.bfloat16], chosen[torch.float64], strict=True)]
    assert torch.cat([x.flatten() for x in different]).float().mean() < 0.002  # rounded scores: 0.1 to 0.5


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_under_autocast_types_may_be_mixed(granularity):
    q, k, v = (torch.randn(1, 2, 120, 4) for _ in range(3))
    cmt = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ours = feed(Memory(5, k=2, granularity=granularity), q, k, v.bfloat16(), [40, 60, 20], cmt=cmt)
    expected = feed(
        Memory(5, k=2, granularity=granularity), q.bfloat16(), k.bfloat16(), v.bfloat16(), [40, 60, 20], cmt=cmt
    )
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


def test_first_layer_is_decided_by_construction():
    """Landmarks equal only up to rounding must not scatter the choice."""
    q, k, v = torch.randn(3, 1, 2, 60, 4, dtype=torch.float32)
    k[:, :, 2::3] = k[:, :, :1]
    noisy = k.clone()
    noisy[:, :, 2::3] *= 1 + 1e-6 * torch.randn(1, 2, 20, 1)
    settings = {"block_size": 2, "k": 3}
    a = feed(Memory(**settings), q, k, v, [30, 30], layer=0)
    b = feed(Memory(**settings), q, noisy, v, [30, 30], layer=0)
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scorer", ["recent", "random", "mean_key"])
def test_ablation_scorers(scorer, granularity):
    q, k, v = torch.randn(3, 2, 2, 120, 8, dtype=torch.float64)
    first = feed(Memory(3, k=2, granularity=granularity, scorer=scorer), q, k, v, [40, 40, 40])
    again = feed(Memory(3, k=2, granularity=granularity, scorer=scorer), q, k, v, [40, 40, 40])
    landmark = feed(Memory(3, k=2, granularity=granularity), q, k, v, [40, 40, 40])
    torch.testing.assert_close(first, again, atol=0, rtol=0)
    assert not torch.allclose(first, landmark)


def test_mean_key_ranks_by_the_mean_of_the_keys():
    """A block whose keys point along the query is found by its mean key though its landmark is silent."""
    width = 4
    q = torch.zeros(1, 1, 12 * width, 8, dtype=torch.float64)
    k, v = torch.zeros(2, 1, 1, 12 * width, 8, dtype=torch.float64)
    q[..., -2:] = 5.0  # the slowest pair: nearly the same at every position
    block = slice(2 * width, 2 * width + 3)
    k[:, :, block, -2:] = 5.0
    v[:, :, block, 0] = 1.0
    for scorer, found in (("mean_key", True), ("landmark", False), ("recent", False)):
        out = feed(Memory(3, k=1, scorer=scorer), q, k, v, [10 * width, 2 * width])
        assert (out[:, :, 10 * width :, 0].max() > 0.1) == found


def test_oldest_blocks_are_dropped_and_counted():
    memory = Memory(3, max_blocks=4, k=2)
    x = torch.randn(1, 2, 50, 4)
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
    seen = []
    memory = Memory(3, k=2, observer=seen.append)
    x = torch.randn(1, 2, 50, 4)
    feed(memory, x, x, x, [2, 25, 23])
    assert [(each.layer, each.position) for each in seen] == [(1, 0), (1, 2), (1, 27)]
    assert [each.ages.shape[-1] for each in seen] == [0, 0, 2]  # nothing was cached before
    assert seen[2].ages.shape == (1, 2, 23, 2)
    assert int(seen[2].ages.max()) <= 6 <= len(seen[2].store)


def test_attending_twice_without_commit_is_refused():
    memory = Memory(3)
    x = torch.randn(1, 1, 5, 4)
    memory.attend(0, x, x, x)
    with pytest.raises(RuntimeError, match=r"commit\(\) before the next chunk, or discard\(\) after an error"):
        memory.attend(0, x, x, x)


def test_a_chunk_that_failed_midway_is_discarded_and_read_again():
    x = torch.randn(1, 1, 12, 4)
    memory, other = Memory(3, k=2), Memory(3, k=2)
    for each in (memory, other):
        for layer in (0, 1):
            each.attend(layer, *[x[:, :, :5]] * 3)
        each.commit()
    memory.attend(0, *[x[:, :, 5:]] * 3)  # layer 1 is not reached
    memory.discard()
    for layer in (0, 1):
        found, expected = (each.attend(layer, *[x[:, :, 5:]] * 3) for each in (memory, other))
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"k": -1}, "retrieval.k=-1"),
        ({"local_blocks": -1}, "model.local_blocks=-1"),
        ({"k": 4, "max_blocks": 3}, "memory.blocks=3 is less than retrieval.k=4"),
        ({"granularity": "per_block"}, "retrieval.granularity=per_block"),
        ({"scorer": "best"}, "retrieval.scorer=best"),
        ({"cutoff": 1.5}, "cmt.cutoff=1.5: must be from 0 to 1"),
        ({"cutoff": [0.1, -0.1]}, "cmt.cutoffs?="),
        ({"mapping": "lavish"}, "positions.mapping=lavish"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    values = {"k": 2, "max_blocks": None, "granularity": "per_head", "scorer": "landmark", **setting}
    with pytest.raises(UserError, match=message):
        check_settings(**values)
    with pytest.raises(UserError, match=message):
        Memory(5, **setting)


def test_heads_that_share_keys_share_their_blocks():
    """One set for each key head, whose blocks are read once for the group; two groups still differ."""
    q = torch.randn(1, 4, 120, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 120, 8, dtype=torch.float64)
    seen = []
    memory = Memory(3, k=2, granularity="per_token_and_group", observer=seen.append)
    feed(memory, q, k, v, [100, 20])
    ages = seen[1].ages
    assert ages.shape == (1, 2, 20, 2)
    assert (ages[:, 0] != ages[:, 1]).any()
    per_head, _ = seen[1].per_query()
    assert torch.equal(per_head, ages.repeat_interleave(2, 1))
    assert memory.stats["retrievals"] == 2 * 20
