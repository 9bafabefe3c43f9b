"""A hierarchy of landmarks: products of gates along the way, in windows and in memory, against plain loops."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from landmark.attention import ContextMiss, Given, Window, landmark_attention
from landmark.attention.rotary import RotaryTable, rotate
from landmark.extensions.hierarchy.gates import Hierarchy, adjust, first_bias, landmark_scores
from landmark.extensions.hierarchy.selector import BestOfGroups
from landmark.memory import Memory
from landmark.memory.positions import Stingy, TruePositions
from landmark.memory.select import Best, Cutoff, SecondLook
from landmark.memory.settings import TIERS
from landmark.memory.store import Store
from landmark.models.checkpoint import new_decoder
from landmark.models.config import DecoderConfig
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch
from tests import oracle
from tests.configurations import changed
from tests.memory.reading import feed
from tests.models.test_decoder import LANDMARK, LOOKING_BACK
from tests.pairs import all_pairs, name_of

SHAPES = {"block_size": [1, 3], "fan_out": [2, 4], "levels": [1, 2, 3], "heads": [(1, 1), (4, 2)]}


def drawn(case, length, prefix=0, batch=2):
    """Queries, keys, values and the biases of groups."""
    generator = torch.Generator().manual_seed(0)
    (heads, kv_heads), keys = case["heads"], prefix + length
    shapes = (
        (batch, heads, length, 4),
        (batch, kv_heads, keys, 4),
        (batch, kv_heads, keys, 4),
        (case["levels"], kv_heads),
    )
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def attend(case, q, k, v, bias, phase=None, prefix=0, **settings):
    """Attention of windows with groups; returns output and log-sum-exp."""
    phase = torch.zeros(len(q), dtype=torch.int64) if phase is None else phase
    wide = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores, own = landmark_scores(q, wide, case["block_size"], phase, prefix, q.shape[-1] ** -0.5)
    gates, _ = adjust(scores, own, Hierarchy(case["fan_out"], bias).for_heads(q.shape[1]))
    return landmark_attention(q, k, v, Window(case["block_size"], phase, prefix), gate=Given(gates), **settings)


def adjusted(blocks, own, fan_out, bias):
    """Scores of earlier blocks (by number) so that they weigh as the products of gates along the way say, in loops.

    own: number of the query's block. bias: of the groups of each level.
    """
    levels = [dict(blocks)]
    for level, of_level in enumerate(bias, 1):
        groups = range(own // fan_out**level)
        children = [[s for n, s in levels[-1].items() if n // fan_out == group] for group in groups]
        levels.append({g: sum(c) / len(c) + of_level for g, c in zip(groups, children, strict=True) if c})

    def of(level, n):
        if level == len(bias) or n // fan_out not in levels[level + 1]:
            return levels[level][n]
        siblings = [s for other, s in levels[level].items() if other // fan_out == n // fan_out]
        return of(level + 1, n // fan_out) + levels[level][n] - oracle.logsumexp(siblings)

    return {n: of(0, n) for n in blocks}


WINDOWS = all_pairs(
    {**SHAPES, "length": [1, 13, 37], "phase": [0, 1], "prefix": [0, 5], "top_k": [None, 2], "cmt": [0, 1]}
)


@pytest.mark.parametrize("case", WINDOWS, ids=name_of)
def test_windows_are_plain_loops_with_gradients_on_both_backends(case):
    """Short first blocks, empty ones, incomplete groups, prefixes, grouped heads, controlled landmarks."""
    leaves, prefix, block_size = drawn(case, case["length"], case["prefix"]), case["prefix"], case["block_size"]
    phase = torch.tensor([case["phase"], block_size])
    settings = {"phase": phase, "prefix": prefix, "top_k": case["top_k"]}
    if case["cmt"]:
        leaves.append(torch.randn(case["heads"][1], 4, dtype=torch.float64, requires_grad=True))
        settings["extra"] = ContextMiss(leaves[-1], torch.rand(2, 80) < 0.5)
    found = []
    for backend in ("reference", "blockwise"):
        out, lse = attend(case, *leaves[:4], **settings, backend=backend)
        total = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + lse.masked_fill(lse.isinf(), 0).sum()
        found.append([out, lse, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-11)
    if case["cmt"]:
        return
    q, k, v, bias = (x.detach().numpy() for x in leaves)
    (heads, kv_heads), score, width = case["heads"], oracle.score_by(), block_size + 1
    for b, h in itertools.product(range(2), range(heads)):
        first, kv = int(phase[b]), h * kv_heads // heads
        gates = np.zeros((len(q[b, h]), 80))
        for i, query in enumerate(q[b, h]):
            own = (first + prefix + i) // width
            places = {n: (n + 1) * width - 1 - first for n in range(own)}
            scores = {n: score(query, k[b, kv, at]) for n, at in places.items() if at > 0}
            for n, gate in adjusted(scores, own, case["fan_out"], bias[:, kv]).items():
                gates[i, n] = gate
        window = {"gates": gates, "top_k": case["top_k"]}
        out, lse = oracle.window(q[b, h], k[b, kv], v[b, kv], block_size, first, **window)
        np.testing.assert_allclose(found[0][0][b, h].detach(), out, atol=1e-10)
        np.testing.assert_allclose(found[0][1][b, h].detach(), lse, atol=1e-10)


def test_gradients_are_those_of_finite_differences():
    case = {"block_size": 1, "fan_out": 2, "levels": 2, "heads": (1, 1)}
    leaves, settings = drawn(case, 13, batch=1), {"phase": torch.tensor([1]), "backend": "blockwise"}

    def outputs(*leaves):
        out, lse = attend(case, *leaves, **settings)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)


def test_scores_of_a_group_add_up_to_its_own():
    """And the first bias is right where all scores are equal: then groups change nothing."""
    scores, own = torch.randn(1, 2, 3, 16, dtype=torch.float64), torch.tensor([[8, 9, 16]])
    scores = scores.masked_fill(torch.arange(16) >= own[:, None, :, None], -torch.inf)
    bias = torch.randn(2, 2, dtype=torch.float64)
    found, _ = adjust(scores, own, Hierarchy(4, bias))
    groups = found.unflatten(-1, (4, 4)).logsumexp(-1)
    means = scores.unflatten(-1, (4, 4)).mean(-1) + bias[0, :, None, None]
    torch.testing.assert_close(groups[:, :, :2, :2], means[:, :, :2, :2])
    torch.testing.assert_close(found[:, :, 2].logsumexp(-1), scores[:, :, 2].mean(-1) + bias.sum(0))
    same = scores.masked_fill(scores > -torch.inf, 0.7)
    torch.testing.assert_close(adjust(same, own, Hierarchy(4, first_bias(4, 2, 2).double()))[0], same)


def test_blocks_before_are_as_blocks_of_the_window():
    """Scores given in two parts, of earlier nodes that are in no complete group yet and of the rest."""
    scores = torch.randn(1, 2, 1, 30, dtype=torch.float64)
    hierarchy, own = Hierarchy(3, torch.randn(2, 2, dtype=torch.float64)), torch.tensor([[30]])
    expected, _ = adjust(scores, own, hierarchy)
    group = scores[..., 18:21].mean(-1) + hierarchy.bias[0, :, None]
    found, (of_blocks, of_groups) = adjust(
        scores[..., 23:], own - 23, hierarchy, [scores[..., 21:23], group[..., None]]
    )
    torch.testing.assert_close(torch.cat([of_blocks, found], -1), expected[..., 21:])
    torch.testing.assert_close(of_groups[..., 0], expected[..., 18:21].logsumexp(-1))


def memory_of(case, bias, k=2, tied=(), around=lambda select: select, **objects):
    select = BestOfGroups(tied_layers=tied, fan_out=case["fan_out"], levels=case["levels"], bias=lambda layer: bias)
    return Memory(case["block_size"], k, select=around(select), **objects)


READINGS = all_pairs({**SHAPES, "chunks": [(30, 1, 9, 13), (7, 7, 1, 1, 30)], "positions": [Stingy(), TruePositions()]})


@pytest.mark.parametrize("case", READINGS, ids=name_of)
@torch.no_grad()
def test_all_blocks_retrieved_are_one_window(case):
    """Groups begin in one chunk and end in another, at every level; chunks of one token too."""
    q, k, v, bias = drawn(case, sum(case["chunks"]))
    out = feed(memory_of(case, bias, k=200, positions=case["positions"]), q, k, v, case["chunks"])
    factors = RotaryTable()(0, q.shape[2], q)
    expected, _ = attend(case, rotate(q, factors), rotate(k, factors), v, bias)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)


def plain_descent(query, keys, added, fan_out, bias, k, own_lags, slots):
    """The blocks that a descent chooses, with the adjusted score of each, in loops.

    Args: query (S, d), rotated for each lag; keys (blocks, d), landmarks; own_lags: newest blocks with a lag of their
    own; slots: S. The others as in `adjusted`.
    """
    lag = [added - b if added - b <= own_lags else slots for b in range(added)]
    levels = [[float(query[lag[b] - 1] @ keys[b]) for b in range(added)]]
    for of_level in bias:
        whole = len(levels[-1]) // fan_out
        levels.append([sum(levels[-1][g * fan_out : (g + 1) * fan_out]) / fan_out + of_level for g in range(whole)])
    chosen: dict[int, float] = {}
    for level in range(len(bias), -1, -1):
        candidates = {}
        for n, score in enumerate(levels[level]):
            group = n // fan_out
            if level < len(bias) and group < len(levels[level + 1]):
                if group in chosen:
                    among = levels[level][group * fan_out : (group + 1) * fan_out]
                    candidates[n] = chosen[group] + score - oracle.logsumexp(among)
            else:
                candidates[n] = score
        chosen = dict(sorted(candidates.items(), key=lambda each: (each[1], each[0]), reverse=True)[:k])
    return chosen


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("case", READINGS[::2], ids=name_of)
@torch.no_grad()
def test_a_descent_by_the_definition(case, same):
    """After 23 blocks one more token: the blocks found, and their weights. With ties the newer nodes win."""
    width, blocks, k = case["block_size"] + 1, 23, 3
    q, keys, v, bias = drawn(case, blocks * width + 1)
    if same:
        keys[:, :, case["block_size"] :: width] = 0.0
    seen = []
    memory = memory_of(case, bias, k=k, positions=case["positions"], observer=seen.append)
    feed(memory, q, keys, v, [blocks * width - 3, 3, 1])
    is_stingy, group = isinstance(case["positions"], Stingy), case["heads"][0] // case["heads"][1]
    slots = k + 1 if is_stingy else 1
    start = [lag * width for lag in range(1, slots + 1)] if is_stingy else [blocks * width]
    for b, h in itertools.product(range(2), range(case["heads"][0])):
        rotated = np.stack([oracle.rotate(q[b, h, -1].numpy(), position) for position in start]) / 2
        landmarks = memory.layers[1].store.landmarks[b, h // group].numpy()
        of_case = case["fan_out"], bias[:, h // group].tolist(), k, k if is_stingy else 0, slots
        chosen = plain_descent(rotated, landmarks, blocks, *of_case)
        assert seen[-1].ages[b, h, 0].tolist() == [blocks - n for n in sorted(chosen)]
        if not is_stingy:  # else a block is attended to at another position than it is scored at
            local = float(rotated[0] @ oracle.rotate(keys[b, h // group, -1].numpy(), blocks * width))
            expected = oracle.softmax([local, *(chosen[n] for n in sorted(chosen))])[1:]
            np.testing.assert_allclose(seen[-1].weights[b, h, 0], expected, atol=1e-10)


CASE = {"block_size": 3, "fan_out": 2, "levels": 2, "heads": (4, 2)}


@torch.no_grad()
def test_without_a_complete_group_it_is_a_flat_memory():
    """Nine blocks, groups of ten: gates at the positions of attention too."""
    case = CASE | {"fan_out": 10}
    q, k, v, bias = drawn(case, 39)
    flat = feed(Memory(3, k=2, select=Best(tied_layers=())), q, k, v, [30, 9])
    torch.testing.assert_close(feed(memory_of(case, bias), q, k, v, [30, 9]), flat)


@torch.no_grad()
def test_rounding_does_not_decide_in_the_first_layer():
    """All its landmarks are one vector up to rounding: blocks, and groups, of older ones have one score."""
    case, chosen = {"block_size": 2, "fan_out": 3, "levels": 2, "heads": (2, 2)}, []
    q, k, v, _ = drawn(case, 120)
    for noise in (0, 1e-13):
        k[:, :, 2::3] = 1 + noise * torch.randn(2, 2, 40, 4, dtype=torch.float64)
        seen = []
        feed(memory_of(case, first_bias(3, 2, 1), 3, (0,), observer=seen.append), q, k, v, [60, 60], layer=0)
        chosen.append(seen[-1].ages)
    assert chosen[0].equal(chosen[1])
    assert 3 < chosen[0].max() < 20, "newer groups win"


@pytest.mark.parametrize("tier", TIERS)
@torch.no_grad()
def test_every_tier_and_a_saved_memory_give_the_same(tier, tmp_path):
    q, k, v, bias = drawn(CASE, 120)
    expected = feed(memory_of(CASE, bias), q, k, v, [50, 30, 40])
    memory, again = (memory_of(CASE, bias, store=Store(tier=tier)) for _ in range(2))
    first = feed(memory, *(x[:, :, :50] for x in (q, k, v)), [50])
    memory.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    rest = feed(again, *(x[:, :, 50:] for x in (q, k, v)), [30, 40])
    assert again.stats["bytes_kept"] > sum(layer.store.bytes_kept for layer in again.layers.values())
    torch.testing.assert_close(torch.cat([first, rest], 2), expected, atol=0, rtol=0)
    swapped = memory.select_samples(torch.tensor([1, 0]))
    chunk = [x[[1, 0], :, 50:80] for x in (q, k, v)]
    torch.testing.assert_close(swapped.attend(1, *chunk)[0], expected[1, :, 50:80])


@torch.no_grad()
def test_a_second_look_chooses_among_the_blocks_of_the_descent():
    q, k, v, bias = drawn(CASE, 60)
    plain, few, every, more = (
        feed(memory_of(CASE, bias, around=around), q, k, v, [40, 20])
        for around in (lambda s: s, *(lambda s, n=n: SecondLook(n, s) for n in (2, 20, 40)))
    )
    torch.testing.assert_close(few, plain, atol=0, rtol=0)
    torch.testing.assert_close(more, every, atol=0, rtol=0)
    assert not torch.allclose(every, plain)


@pytest.mark.parametrize("cutoff", [0.0, 0.5, 0.9])
@torch.no_grad()
def test_a_cutoff_drops_lookups_and_changes_nothing_else(cutoff):
    """With a context miss token retrieved blocks share its weight by adjusted scores."""
    q, k, v, bias = drawn(CASE, 60)
    extra, seen = ContextMiss(torch.randn(2, 4, dtype=torch.float64)), []
    memories = [memory_of(CASE, bias, around=lambda s: Cutoff(cutoff, s)), memory_of(CASE, bias, observer=seen.append)]
    out, full = (feed(memory, q, k, v, [30, 1, 29], extra=extra) for memory in memories)
    for one, rows in zip(seen[1:], (slice(30, 31), slice(31, 60)), strict=True):
        reads = one.cmt_weight >= cutoff
        torch.testing.assert_close(out[:, :, rows][reads], full[:, :, rows][reads])
        torch.testing.assert_close(one.per_query()[1].sum(-1), one.cmt_weight)
    assert (memories[0].stats["drop_rate"] > 0) == (cutoff > 0)


GROUPS = changed(LANDMARK, **LOOKING_BACK, landmark_key="mean", landmark_bias=True, fan_out=2, levels=2)


def tiny(config):
    torch.manual_seed(0)
    model = new_decoder(config).double()
    for parameter in model.parameters():  # the initialisation is too small to tell paths apart
        if parameter.ndim == 2:
            parameter.data *= 15
    return model


@pytest.mark.parametrize(
    "config",
    [GROUPS, replace(LANDMARK, options={"fan_out": 3}), replace(GROUPS, num_kv_heads=1)],
    ids=["mean", "token", "shared"],
)
@torch.no_grad()
def test_a_model_whose_memory_holds_everything_reads_as_one_window(config):
    model, tokens = tiny(config), torch.randint(0, 50, (2, 70))
    memory = model.new_memory(k=20)
    parts = [model(chunk, memory=memory) for chunk in tokens.split([17, 1, 1, 30, 21], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-10, rtol=1e-10)


def test_groups_weigh_as_much_as_their_blocks_at_first_and_learn_it_with_the_landmark_bias():
    batch = WindowBatch(torch.randint(0, 50, (2, 60)), torch.randint(0, 50, (2, 60)), torch.tensor([2, 5]))
    for config in (GROUPS, replace(LANDMARK, options={"fan_out": 2})):
        model = tiny(config)
        biases = [p for name, p in model.named_parameters() if name.endswith("attention.group_bias")]
        assert [bias.shape for bias in biases] == [(config.options.get("levels", 1), config.num_heads)] * 2
        sum(loss for loss, _ in model.window_losses(batch)).backward()
        assert all((p.grad is not None and bool(p.grad.all())) == config.keys.bias for p in biases)
    assert new_decoder(GROUPS).blocks[0].attention.group_bias.eq(math.log(2)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fan_out": 1, "levels": 1}, "model.fan_out=1, model.levels=.*: must be at least 2 and 1"),
        ({"fan_out": None}, "model.levels=2: are levels of groups"),
        ({"backend": "triton"}, "backend"),
        ({"alpha": 0.5}, "model.alpha"),
        ({"kind": "transformer", "landmark_key": "token", "landmark_bias": False}, "model=landmark"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        new_decoder(DecoderConfig.from_flat(GROUPS.to_flat() | change))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"granularity": "per_head"}, "retrieval.granularity=per_head: with model.fan_out"),
        ({"scorer": "recent"}, "retrieval.scorer=recent"),
        ({"index": "faiss", "candidates": 9}, "memory.index=faiss"),
        ({"max_blocks": 9}, "memory.blocks=9: with model.fan_out .*, set memory.blocks=null"),
    ],
)
def test_what_a_descent_cannot_do_is_refused(setting, message):
    with pytest.raises(UserError, match=message):
        tiny(GROUPS).new_memory(**setting)
