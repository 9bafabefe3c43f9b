"""A hierarchy of landmarks: products of gates along the way, in windows and in memory, against plain loops."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from landmark.attention import Window
from landmark.attention.scoring import keep_best
from landmark.extensions.hierarchy import GroupMemory, adjusted, attend_by_gates, landmark_scores
from landmark.memory import Memory
from landmark.memory.layer import Stingy, TruePositions
from landmark.memory.select import Best
from landmark.memory.settings import MAPPINGS
from landmark.memory.store import Store
from landmark.models.checkpoint import new_decoder
from landmark.models.config import DecoderConfig
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch
from tests import oracle
from tests.configurations import changed
from tests.memory.reading import feed
from tests.models.test_decoder import LANDMARK, LOOKING_BACK, tiny
from tests.pairs import all_pairs, name_of

SHAPES = {"block_size": [1, 3], "fan_out": [2, 4], "levels": [1, 2, 3], "heads": [(1, 1), (4, 2)]}


def drawn(case, length, prefix=0, batch=2):
    """Queries, keys, values and the biases of groups."""
    generator = torch.Generator().manual_seed(0)
    (heads, kv_heads), keys = case["heads"], prefix + length
    shapes = (batch, heads, length, 4), *[(batch, kv_heads, keys, 4)] * 2, (case["levels"], kv_heads)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def attend(case, q, k, v, bias, phase=None, prefix=0, top_k=None):
    """Attention of windows with groups; returns output and log-sum-exp."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    layout = Window(case["block_size"], phase, prefix)
    scores, own = landmark_scores(q, k, layout, 0.5)
    gates = adjusted(scores, own, case["fan_out"], bias.repeat_interleave(q.shape[1] // bias.shape[1], 1))[0]
    gates = gates if top_k is None else keep_best(gates.clone(), top_k, -1)
    return attend_by_gates(q, k, v, gates, layout, 0.5)


def by_definition(scores, own, fan_out, bias):
    """For each level the scores with which nodes weigh as the products of gates along the way, by number, in loops.
    scores: of earlier blocks, by number. own: number of the query's block. bias: of the groups of each level."""
    levels = [dict(scores)]
    for level, of_level in enumerate(bias, 1):
        groups = range(own // fan_out**level)
        children = [[s for n, s in levels[-1].items() if n // fan_out == group] for group in groups]
        levels.append({g: sum(c) / len(c) + of_level for g, c in zip(groups, children, strict=True) if c})

    def of(level, n):
        if level == len(bias) or n // fan_out not in levels[level + 1]:
            return levels[level][n]
        siblings = [s for other, s in levels[level].items() if other // fan_out == n // fan_out]
        return of(level + 1, n // fan_out) + levels[level][n] - oracle.logsumexp(siblings)

    return [{n: of(level, n) for n in nodes} for level, nodes in enumerate(levels)]


WINDOWS = all_pairs({**SHAPES, "length": [1, 13, 37], "phase": [0, 1], "prefix": [0, 5], "top_k": [None, 2]})


@pytest.mark.parametrize("case", WINDOWS, ids=name_of)
@torch.no_grad()
def test_windows_are_plain_loops(case):
    leaves, prefix, width = drawn(case, case["length"], case["prefix"]), case["prefix"], case["block_size"] + 1
    phase = torch.tensor([case["phase"], case["block_size"]])
    found = attend(case, *leaves, phase=phase, prefix=prefix, top_k=case["top_k"])
    q, k, v, bias = (x.numpy() for x in leaves)
    (heads, kv_heads), score = case["heads"], oracle.score_by()
    for b, h in itertools.product(range(2), range(heads)):
        first, kv = int(phase[b]), h * kv_heads // heads
        gates = np.zeros((len(q[b, h]), 80))
        for i, query in enumerate(q[b, h]):
            own = (first + prefix + i) // width
            places = {n: (n + 1) * width - 1 - first for n in range(own)}
            scores = {n: score(query, k[b, kv, at]) for n, at in places.items() if at > 0}
            for n, gate in by_definition(scores, own, case["fan_out"], bias[:, kv])[0].items():
                gates[i, n] = gate
        window = {"gates": gates, "top_k": case["top_k"]}
        expected = oracle.window(q[b, h], k[b, kv], v[b, kv], case["block_size"], first, **window)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours[b, h], theirs, atol=1e-10)


def test_gradients_are_those_of_finite_differences():
    case = {"block_size": 1, "fan_out": 2, "levels": 2, "heads": (2, 1)}

    def outputs(*leaves):
        out, lse = attend(case, *leaves, phase=torch.tensor([1]))
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(outputs, drawn(case, 13, batch=1), fast_mode=True)


def memory_of(case, bias, k=2, tied=(), **objects):
    groups = {"fan_out": case["fan_out"], "bias": lambda layer: bias, "tied_layers": tied}
    return GroupMemory(case["block_size"], k, **groups, **objects)


READINGS = all_pairs({**SHAPES, "positions": [Stingy(), TruePositions()], "same": [False, True]})


def plain_descent(levels, fan_out, k):
    """The numbers of the blocks chosen: on each level the k best nodes that are in a chosen group or in none."""
    chosen = above = set()
    for nodes in reversed(levels):
        among = [n for n in nodes if n // fan_out not in above or n // fan_out in chosen]
        chosen, above = set(sorted(among, key=lambda n: (nodes[n], n))[-k:]), set(nodes)
    return sorted(chosen)


@pytest.mark.parametrize("case", READINGS, ids=name_of)
@torch.no_grad()
def test_a_descent_by_the_definition(case):
    """After 23 blocks one more token: the blocks found, and their weights. With ties the newer nodes win."""
    width, blocks, k = case["block_size"] + 1, 23, 3
    q, keys, v, bias = drawn(case, blocks * width + 1)
    if case["same"]:
        keys[:, :, case["block_size"] :: width] = 0.0
    seen = []
    memory = memory_of(case, bias, k=k, positions=case["positions"], observer=seen.append)
    feed(memory, q, keys, v, [blocks * width - 3, 3, 1])
    is_stingy, group = isinstance(case["positions"], Stingy), case["heads"][0] // case["heads"][1]
    start = [lag * width for lag in range(1, k + 2)] if is_stingy else [blocks * width]
    for b, h in itertools.product(range(2), range(case["heads"][0])):
        rotated = [oracle.rotate(q[b, h, -1].numpy(), position) / 2 for position in start]
        landmarks = memory.layers[1].store.landmarks[b, h // group].numpy()
        scores = {n: float(rotated[min(blocks - n, len(start)) - 1] @ landmarks[n]) for n in range(blocks)}
        levels = by_definition(scores, blocks, case["fan_out"], bias[:, h // group].tolist())
        chosen = plain_descent(levels, case["fan_out"], k)
        assert seen[-1].ages[b, h, 0].tolist() == [blocks - n for n in chosen]
        if not is_stingy:  # else a block is attended to at another position than it is scored at
            local = float(rotated[0] @ oracle.rotate(keys[b, h // group, -1].numpy(), blocks * width))
            expected = oracle.softmax([local, *(levels[0][n] for n in chosen)])[1:]
            np.testing.assert_allclose(seen[-1].weights[b, h, 0], expected, atol=1e-10)


CASE = {"block_size": 3, "fan_out": 2, "levels": 2, "heads": (4, 2)}


@torch.no_grad()
def test_rounding_does_not_decide_in_the_first_layer_and_without_a_complete_group_it_is_a_flat_memory():
    """All its landmarks are one vector up to rounding: blocks, and groups, of older ones have one score."""
    case, chosen = {"block_size": 2, "fan_out": 3, "levels": 2, "heads": (2, 2)}, []
    (q, k, v, _), bias = drawn(case, 120), torch.full((2, 1), math.log(3))
    for noise in (0, 1e-13):
        k[:, :, 2::3] = 1 + noise * torch.randn(2, 2, 40, 4, dtype=torch.float64)
        seen = []
        feed(memory_of(case, bias, 3, (0,), observer=seen.append), q, k, v, [60, 60], layer=0)
        chosen.append(seen[-1].ages)
    assert chosen[0].equal(chosen[1])
    assert 3 < chosen[0].max() < 20, "newer groups win"
    # Nine blocks, groups of ten: gates at the positions of attention too.
    q, k, v, bias = drawn(CASE, 39)
    flat = feed(Memory(3, k=2, select=Best(tied_layers=())), q, k, v, [30, 9])
    torch.testing.assert_close(feed(memory_of(CASE | {"fan_out": 10}, bias), q, k, v, [30, 9]), flat)


@torch.no_grad()
def test_a_saved_memory_and_selected_samples_continue_as_one_that_goes_on(tmp_path):
    q, k, v, bias = drawn(CASE, 120)
    memory, loaded = (memory_of(CASE, bias, store=Store(tier="disk")) for _ in range(2))
    feed(memory, *(x[:, :, :50] for x in (q, k, v)), [50])
    memory.save(tmp_path / "saved")
    loaded.load(tmp_path / "saved")
    swapped, rest = memory.select_samples(torch.tensor([1, 0])), [x[:, :, 50:] for x in (q, k, v)]
    expected = feed(memory, *rest, [30, 40])
    torch.testing.assert_close(feed(loaded, *rest, [30, 40]), expected, atol=0, rtol=0)
    torch.testing.assert_close(feed(swapped, *(x[[1, 0]] for x in rest), [30, 40])[[1, 0]], expected)


GROUPS = changed(LANDMARK, **LOOKING_BACK, landmark_key="mean", landmark_bias=True, fan_out=2, levels=2)


MODELS = all_pairs(
    {
        "fan_out": [2, 4],
        "levels": [1, 2, 3],
        "num_kv_heads": [1, 2],
        "mapping": MAPPINGS,
        "chunks": [[17, 1, 1, 30, 21], [7, 7, 1, 1, 54]],
        "landmark_bias": [False, True],
        "landmark_key": ["token", "mean"],
    }
)


@pytest.mark.parametrize("case", MODELS, ids=name_of)
@torch.no_grad()
def test_a_model_whose_memory_holds_everything_reads_as_one_window(case):
    """Groups begin in one chunk and end in another, at every level; chunks of one token too."""
    options = {name: case[name] for name in case if name not in ("mapping", "chunks")}
    model, tokens = tiny(changed(GROUPS, **options)), torch.randint(0, 50, (2, 70))
    memory = model.new_memory(k=20, mapping=case["mapping"])
    parts = [model(chunk, memory=memory) for chunk in tokens.split(case["chunks"], 1)]
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
    own = torch.tensor([[8, 9, 16]])
    scores = torch.full((1, 2, 3, 16), 0.7).masked_fill(torch.arange(16) >= own[:, None, :, None], -torch.inf)
    torch.testing.assert_close(adjusted(scores, own, 4, torch.full((2, 2), math.log(4)))[0], scores)


OTHER = {"granularity": "per_head", "scorer": "recent", "rerank": 8, "index": "faiss", "max_blocks": 9}
REFUSED = [
    ({"fan_out": 1, "levels": 1}, {}, "model.fan_out=1, model.levels=.*: must be at least 2 and 1"),
    ({"fan_out": None}, {}, "model.levels=2: are levels of groups"),
    ({"backend": "triton"}, {}, "backend"),
    ({"cmt": True}, {}, "cmt=off"),
    ({"alpha": 0.5}, {}, "model.alpha"),
    ({"kind": "transformer", "landmark_key": "token", "landmark_bias": False}, {}, "model=landmark"),
    *(
        ({}, {name: x}, f"{name.removeprefix('max_')}={x}: with model.fan_out .* their groups, set ")
        for name, x in OTHER.items()
    ),
    ({}, {"first": 1}, "retrieval.first=1"),
]


@pytest.mark.parametrize(("change", "setting", "message"), REFUSED)
def test_what_groups_cannot_do_is_refused(change, setting, message):
    with pytest.raises(UserError, match=message):
        new_decoder(DecoderConfig.from_flat(GROUPS.to_flat() | change)).new_memory(**setting)
