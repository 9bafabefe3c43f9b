"""Reading with a hierarchy of landmarks: one window where all is retrieved, else the definition of a descent."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from landmark.attention.hierarchy import Hierarchy

from landmark.attention import landmark_attention
from landmark.attention.rotary import RotaryTable, rotate
from landmark.memory import Memory
from landmark.memory.settings import TIERS, check_settings
from landmark.utils.errors import UserError
from tests import naive
from tests.memory.test_memory import feed


@st.composite
def readings(draw):
    return {
        "chunks": draw(st.lists(st.integers(1, 30), min_size=1, max_size=6)),
        "block_size": draw(st.integers(1, 4)),
        "fan_out": draw(st.integers(2, 4)),
        "levels": draw(st.integers(1, 3)),
        "heads": draw(st.sampled_from([(2, 2), (4, 2)])),
        "mapping": draw(st.sampled_from(["stingy", "true"])),
        "seed": draw(st.integers(0, 1000)),
    }


def text(reading, length=None):
    generator = torch.Generator().manual_seed(reading["seed"])
    (heads, kv_heads), length = reading["heads"], length or sum(reading["chunks"])
    q = torch.randn(2, heads, length, 4, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(2, kv_heads, length, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    return q, k, v, torch.randn(reading["levels"], kv_heads, dtype=torch.float64, generator=generator)


def memory_of(reading, **settings):
    names = "block_size", "fan_out", "levels", "mapping"
    return Memory(**{name: reading[name] for name in names}, tie_layers=(), **settings)


@given(readings())
@settings(max_examples=25, deadline=None)
def test_all_blocks_retrieved_are_one_window(reading):
    """Groups begin in one chunk and end in another, at every level; chunks of one token too."""
    q, k, v, bias = text(reading)
    out = feed(memory_of(reading, k=200), q, k, v, reading["chunks"], group_bias=bias)
    factors = RotaryTable()(0, q.shape[2], q)
    hierarchy = Hierarchy(reading["fan_out"], bias)
    whole = rotate(q, factors), rotate(k, factors), v
    expected = landmark_attention(*whole, block_size=reading["block_size"], hierarchy=hierarchy)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)


def plain_descent(query, keys, added, fan_out, bias, k, num_recent, slots):
    """The blocks that a descent chooses, with the adjusted score of each, in loops.

    Args:
        query: (S, d), one query, rotated for each lag.
        keys: (blocks, d), landmarks.
        added: number of blocks.
        fan_out, bias: of the hierarchy; bias of each level.
        k: nodes kept at each level.
        num_recent: blocks with a lag of their own.
        slots: S.
    """
    lag = [added - b if added - b <= num_recent else slots for b in range(added)]
    levels = [[float(query[lag[b] - 1] @ keys[b]) for b in range(added)]]
    for of_level in bias:
        whole = len(levels[-1]) // fan_out
        levels.append([sum(levels[-1][g * fan_out : (g + 1) * fan_out]) / fan_out + of_level for g in range(whole)])
    kept: dict[int, float] = {}
    for level in range(len(bias), -1, -1):
        candidates = {}
        for n, score in enumerate(levels[level]):
            group = n // fan_out
            if level < len(bias) and group < len(levels[level + 1]):
                if group in kept:
                    among = levels[level][group * fan_out : (group + 1) * fan_out]
                    candidates[n] = kept[group] + score - math.log(sum(map(math.exp, among)))
            else:
                candidates[n] = score
        kept = dict(sorted(candidates.items(), key=lambda each: (each[1], each[0]), reverse=True)[:k])
    return kept


@given(readings(), st.integers(1, 4), st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_descent_by_the_definition(reading, k, same):
    """After 9 … 60 blocks one more token: the blocks found, and their weights. With ties the newer nodes win."""
    width = reading["block_size"] + 1
    blocks = 9 + reading["seed"] % 52
    q, keys, v, bias = text(reading, blocks * width + 1)
    if same:
        keys[:, :, reading["block_size"] :: width] = 0.0
    seen = []
    memory = memory_of(reading, k=k, observer=seen.append)
    feed(memory, q, keys, v, [blocks * width - 3, 3], group_bias=bias)
    memory.attend(1, q[:, :, -1:], keys[:, :, -1:], v[:, :, -1:], group_bias=bias)
    ages, weights = seen[-1].ages, seen[-1].weights
    store = memory.layers[1].store
    is_stingy = reading["mapping"] == "stingy"
    slots = min(blocks, k + 1) if is_stingy else 1
    start = [lag * width for lag in range(1, slots + 1)] if is_stingy else [blocks * width]
    group = reading["heads"][0] // reading["heads"][1]
    for b in range(2):
        for h in range(reading["heads"][0]):
            rotated = np.stack([naive.rotate(q[b, h, -1].numpy(), position) for position in start]) / 2
            landmarks = store.landmarks[b, h // group].numpy()
            settings = reading["fan_out"], bias[:, h // group].tolist(), k, k if is_stingy else 0, slots
            chosen = plain_descent(rotated, landmarks, blocks, *settings)
            assert ages[b, h, 0].tolist() == [blocks - n for n in sorted(chosen)]
            if not is_stingy:  # else a block is attended to at another position than it is scored at
                own = keys[b, h // group, -1].numpy()
                local = float(rotated[0] @ naive.rotate(own, blocks * width))
                expected = naive.softmax([local, *(chosen[n] for n in sorted(chosen))])[1:]
                np.testing.assert_allclose(weights[b, h, 0], expected, atol=1e-10)


def test_without_a_complete_group_it_is_a_flat_memory():
    """Nine blocks, groups of ten: gates at the positions of attention too."""
    reading = {"block_size": 3, "fan_out": 10, "levels": 2, "mapping": "stingy", "heads": (4, 2), "seed": 0}
    q, k, v, bias = text(reading, 39)
    found = feed(memory_of(reading, k=2), q, k, v, [30, 9], group_bias=bias)
    torch.testing.assert_close(found, feed(Memory(3, k=2, tie_layers=()), q, k, v, [30, 9]))


def test_rounding_does_not_decide_in_the_first_layer():
    """All its landmarks are one vector up to rounding: blocks, and groups, of older ones have one score."""
    reading = {"block_size": 2, "mapping": "stingy", "heads": (2, 2), "levels": 2, "seed": 0}
    q, k, v, _ = text(reading, 120)
    chosen = []
    for noise in (0, 1e-13):
        k[:, :, 2::3] = 1 + noise * torch.randn(2, 2, 40, 4, dtype=torch.float64)
        seen = []
        feed(Memory(2, k=3, fan_out=3, levels=2, observer=seen.append), q, k, v, [60, 60], layer=0)
        chosen.append(seen[-1].ages)
    assert chosen[0].equal(chosen[1])
    assert 3 < chosen[0].max() < 20, "newer groups win"


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_and_a_saved_memory_give_the_same(tier, tmp_path):
    reading = {"block_size": 3, "fan_out": 2, "levels": 2, "mapping": "stingy", "heads": (4, 2), "seed": 3}
    q, k, v, bias = text(reading, 120)
    expected = feed(memory_of(reading, k=2), q, k, v, [50, 30, 40], group_bias=bias)
    memory = memory_of(reading, k=2, tier=tier)
    first = feed(memory, *(x[:, :, :50] for x in (q, k, v)), [50], group_bias=bias)
    memory.save(tmp_path / "saved")
    again = memory_of(reading, k=2, tier=tier)
    again.load(tmp_path / "saved")
    rest = feed(again, *(x[:, :, 50:] for x in (q, k, v)), [30, 40], group_bias=bias)
    assert again.stats["bytes_kept"] > sum(layer.store.bytes_kept for layer in again.layers.values())
    torch.testing.assert_close(torch.cat([first, rest], 2), expected, atol=0, rtol=0)
    swapped = memory.select(torch.tensor([1, 0]))
    chunk = [x[[1, 0], :, 50:80] for x in (q, k, v)]
    torch.testing.assert_close(swapped.attend(1, *chunk, group_bias=bias)[0], expected[1, :, 50:80])


def test_a_memory_for_training_has_the_gradients_of_finite_differences():
    """Of the chunk, and of the biases of groups; the blocks in memory have none."""
    reading = {"block_size": 2, "fan_out": 2, "levels": 2, "mapping": "stingy", "heads": (2, 1), "seed": 0}
    q, k, v, bias = (x[:1] if x.ndim == 4 else x for x in text(reading, 46))

    def second(*chunk):
        memory = memory_of(reading, k=3, gradient=True)
        memory.attend(1, q[:, :, :40], k[:, :, :40], v[:, :, :40], group_bias=chunk[-1])
        memory.commit()
        return memory.attend(1, *chunk[:3], group_bias=chunk[3])

    leaves = [x[:, :, 40:].clone().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(second, [*leaves, bias.requires_grad_()], fast_mode=True)


@given(readings(), st.sampled_from([0.0, 0.5, 0.9]))
@settings(max_examples=12, deadline=None)
def test_a_cutoff_drops_lookups_and_changes_nothing_else(reading, cutoff):
    """With a context miss token retrieved blocks share its weight by adjusted scores."""
    q, k, v, bias = text(reading)
    cmt = torch.randn(reading["heads"][1], 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    seen, all_seen = [], []
    out = feed(
        memory_of(reading, k=2, cutoff=cutoff, observer=seen.append),
        q,
        k,
        v,
        reading["chunks"],
        cmt=cmt,
        group_bias=bias,
    )
    every = memory_of(reading, k=2, observer=all_seen.append)
    full = feed(every, q, k, v, reading["chunks"], cmt=cmt, group_bias=bias)
    start = 0
    for one, reference, size in zip(seen, all_seen, reading["chunks"], strict=True):
        rows = slice(start, start + size)
        if reference.ages.shape[-1]:
            kept = reference.cmt_weight >= cutoff
            torch.testing.assert_close(out[:, :, rows][kept], full[:, :, rows][kept])
            weights = reference.per_query()[1].sum(-1)
            torch.testing.assert_close(weights, reference.cmt_weight)
            if one.ages.shape[-1]:
                assert one.per_query()[1][~kept].eq(0).all()
        start += size


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"granularity": "per_head"}, "retrieval.granularity=per_head: with model.fan_out=4"),
        ({"scorer": "recent"}, "retrieval.scorer=recent"),
        ({"index": "faiss", "candidates": 9}, "memory.index=faiss"),
        ({"max_blocks": 9}, "memory.blocks=9: with model.fan_out=4 blocks are found by their groups, set null"),
        ({"fan_out": 1}, "model.fan_out=1"),
    ],
)
def test_what_a_descent_cannot_do_is_refused(setting, message):
    common = {"k": 4, "max_blocks": None, "granularity": "per_token_and_head", "scorer": "landmark", "fan_out": 4}
    check_settings(**common)
    with pytest.raises(UserError, match=message):
        check_settings(**(common | setting))
