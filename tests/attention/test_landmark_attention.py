"""Every path computes the paper's equations, for every pair of options, with gradients of output and log-sum-exp."""

import itertools
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from landmark import attention
from landmark.attention import ContextMiss, Grouped, Packed, Scoring, Sinks, Window, landmark_attention
from landmark.attention.keys import Keys, WindowBlocks
from landmark.attention.layout import blocks_and_landmarks
from landmark.attention.plain import causal_attention
from landmark.attention.rotary import RotaryTable, rotary_factors, rotary_frequencies, rotate
from landmark.utils.constants import channels_of
from landmark.utils.window_batch import most_blocks
from tests import oracle
from tests.pairs import all_pairs, name_of

CASE = {"block_size": 6, "queries": 40, "prefix": 9, "lengths": None, "heads": (2, 1), "dim": 4, "alpha": 0.0}
CASE |= {"phase": "on a landmark", "extra": None, "scoring": (None, None)}


def leaves_of(case, dtype=torch.float64, compute=None):
    """Queries, keys, values and the extra place, rounded to `dtype` and computed as `compute`, by name. lengths: of
    packed documents; None: there are two windows."""
    case, generator = CASE | case, torch.Generator().manual_seed(0)
    (heads, kv_heads), lengths, dim = case["heads"], case["lengths"], case["dim"]
    batch, queries = (2, case["queries"]) if lengths is None else (1, sum(lengths))
    keys = case["prefix"] + queries
    shapes = {"q": (batch, heads, queries, dim), "k": (batch, kv_heads, keys, dim), "v": (batch, kv_heads, keys, dim)}
    if case["extra"] is not None:
        shapes["extra"] = (heads,) if case["extra"] == "sinks" else (kv_heads, dim)
    drawn = {name: torch.randn(*s, dtype=torch.float64, generator=generator).to(dtype) for name, s in shapes.items()}
    return {name: x.to(compute or dtype).requires_grad_() for name, x in drawn.items()}


def arguments(case, leaves):
    case = CASE | case
    block_size, lengths, extra = case["block_size"], case["lengths"], case["extra"]
    phases = {"cut": [block_size // 2, 0, 1, 1], "on a landmark": [block_size, 1, 1, 0]}
    samples, length = (2, case["prefix"] + case["queries"]) if lengths is None else (len(lengths), max(lengths))
    phase = None if case["phase"] is None else torch.tensor(phases[case["phase"]][:samples])
    layout = Window(block_size, phase, case["prefix"])
    if lengths is not None:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        layout = Packed(block_size, phase, ends)
    if extra == "sinks":
        extra = Sinks(leaves["extra"])
    elif extra is not None:
        drawn = torch.rand(samples, most_blocks(length, block_size), generator=torch.Generator().manual_seed(1))
        extra = ContextMiss(leaves["extra"], drawn < 0.5 if extra == "controlled" else None)
    options = {"gate": Grouped(case["alpha"]), "scoring": Scoring(*case["scoring"])}
    return {"layout": layout, "extra": extra, **options}


def run(case, backend, dtype=torch.float64, compute=None, scale=1.0):
    """Output, log-sum-exp and gradients. scale: factor of queries and keys."""
    leaves, generator = leaves_of(case, dtype, compute), torch.Generator().manual_seed(2)
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = landmark_attention(q * scale, k * scale, v, **arguments(case, leaves), backend=backend)
    of_out, of_lse = (torch.randn(x.shape, dtype=torch.float64, generator=generator).to(dtype) for x in (out, lse))
    total = (out * of_out).sum() + (lse.masked_fill(lse.isinf(), 0.0) * of_lse).sum()
    gradients = torch.autograd.grad(total, leaves.values(), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


BACKENDS = ["reference", "blockwise", "triton"]
CASES = all_pairs(
    {
        "block_size": [1, 2, 5],
        "queries": [1, 4, 17, 30],
        "lengths": [None, [7, 0, 1, 12]],
        "phase": [None, "cut", "on a landmark"],
        "prefix": [0, 1, 7],
        "heads": [(1, 1), (2, 1), (4, 2)],
        "alpha": [0.0, 0.4, 1.0],
        "extra": [None, "free", "controlled", "sinks"],
        "scoring": [(None, None), (0.3, None), (None, 1.5)],
    },
    lambda case: case["lengths"] is None or not case["prefix"],
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_plain_loops_and_gradients(case, new_memory_is_nan):
    """The reference is plain loops; blockwise has its numbers and gradients, whatever the size of its tiles."""
    leaves, expected = leaves_of(case), run(case, "reference")
    given, score = arguments(case, leaves), oracle.score_by(*case["scoring"])
    q, k, v = (leaves[name].detach().numpy() for name in "qkv")
    group, extra = q.shape[1] // k.shape[1], given["extra"]
    ends = [] if case["lengths"] is None else given["layout"].cu_seqlens.tolist()
    samples = [(0, slice(*rows)) for rows in itertools.pairwise(ends)] or [(0, slice(None)), (1, slice(None))]
    for (number, (b, rows)), h in itertools.product(enumerate(samples), range(q.shape[1])):
        own = {"score": score, "alpha": case["alpha"]}
        if isinstance(extra, Sinks):
            own["extra"] = [extra.scores[h].item()] * len(q[b, h])
        elif extra is not None:
            own["extra"] = [score(query, extra.key[h // group].detach().numpy()) for query in q[b, h, rows]]
            if extra.controlled is not None:
                own["controlled"] = set(extra.controlled[number].nonzero()[:, 0].tolist())
        phase, kv = 0 if case["phase"] is None else int(given["layout"].phase[number]), (b, h // group, rows)
        out, lse = oracle.window(q[b, h, rows], k[kv], v[kv], case["block_size"], phase, **own)
        np.testing.assert_allclose(expected["out"][b, h, rows], out, atol=1e-10)
        np.testing.assert_allclose(expected["lse"][b, h, rows], lse, atol=1e-10)
    for size, rows in ((1 << 20, 102), (1, 1), (300, 20)):
        with mock.patch.multiple(attention.blockwise, TILE_SIZE=size, TILE_ROWS=rows):
            for name, x in run(case, "blockwise").items():
                torch.testing.assert_close(x, expected[name], atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "queries", "prefix"), [(0, 5, 3), (2, 0, 3), (2, 0, 0)])
def test_no_sample_and_no_query_give_nothing(batch, queries, prefix, backend):
    leaves = [
        torch.randn(batch, heads, n, 4).requires_grad_() for heads, n in ((2, queries), *[(1, prefix + queries)] * 2)
    ]
    key = torch.randn(1, 4).requires_grad_()
    out, lse = landmark_attention(*leaves, Window(6, None, prefix), extra=ContextMiss(key), backend=backend)
    assert (out.shape, lse.shape) == ((batch, 2, queries, 4), (batch, 2, queries))
    assert not any(bool(x.any()) for x in torch.autograd.grad(out.sum(), [*leaves, key]))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_all_queries_that_see_them_and_no_other_document(value, backend):
    q, k, v = torch.randn(3, 1, 2, 60, 4)
    layout = Packed(6, None, torch.tensor([0, 20, 45, 60], dtype=torch.int32))
    expected, _ = landmark_attention(q, k, v, layout, backend=backend)
    v[:, :, 29] = value
    ours, _ = landmark_attention(q, k, v, layout, backend=backend)
    assert not ours[:, :, 29:45].isfinite().any()
    for other in (slice(20), slice(45, None)):
        torch.testing.assert_close(ours[:, :, other], expected[:, :, other], atol=0, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_may_be_mixed_under_autocast_and_strides_may_be_any(backend):
    q, k, v = (x.transpose(1, 2) for x in torch.randn(1, 20, 3, 2, 8).unbind(2))
    settings = {"layout": Window(6), "extra": ContextMiss(torch.randn(2, 8)), "backend": backend}
    expected, _ = landmark_attention(q.contiguous(), k.contiguous(), v.contiguous(), **settings)
    backwards = [x.flip(-1).transpose(2, 3).contiguous().transpose(2, 3).flip(-1) for x in (q, k, v)]
    for given in ((q, k, v), backwards):
        torch.testing.assert_close(landmark_attention(*given, **settings)[0], expected)
    with torch.autocast("cpu", torch.float16):
        ours, _ = landmark_attention(q, k, v.half(), **settings)
    assert ours.dtype == torch.float16
    expected, _ = landmark_attention(q.half(), k.half(), v.half(), **settings)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case", [{"dim": 128, "alpha": 0.5, "extra": "sinks"}, {"dim": 32, "extra": "controlled"}], ids=name_of
)
def test_results_are_exact_but_for_rounding(case, dtype):
    """Half precision is rounded once; float32 stays within 1e-5, gradients too."""
    case = {"block_size": 50, "queries": 150, **case}
    exact, ours = run(case, "reference", dtype, torch.float64), run(case, "blockwise", dtype)
    assert ours["out"].dtype == dtype
    if dtype == torch.float32:
        for name, x in ours.items():
            torch.testing.assert_close(x.double(), exact[name], atol=1e-5, rtol=1e-5)
        return
    eps = float(torch.finfo(dtype).eps)
    torch.testing.assert_close(ours["out"].double(), exact["out"], atol=1e-5, rtol=eps)
    torch.testing.assert_close(run(case, "reference", dtype)["out"].double(), exact["out"], atol=8 * eps, rtol=8 * eps)


def test_no_tensor_is_quadratic_in_the_length():
    length = 3000
    leaves = [torch.randn(1, 2, length, 8).requires_grad_() for _ in range(3)]
    fresh = mock.patch.object(
        attention.blockwise_tiles, "_kept", threading.local()
    )  # not what an earlier call has left
    profiler = torch.profiler.profile(profile_memory=True)
    with fresh, profiler as profile, mock.patch.object(attention.blockwise, "TILE_SIZE", 1):
        landmark_attention(*leaves, Window(50))[0].sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events()) / 4  # numbers in float32
    assert largest <= 102 * (length + 102) < length * length / 20, "a tile"


def test_sinks_merge_into_a_softmax_that_is_computed_already():
    """Under autocast q is bfloat16, and a score between two of its numbers is not rounded."""
    q, k, v = torch.randn(3, 2, 4, 31, 8)
    sinks, layout = Sinks(torch.full((4,), 8.0 + 1 / 64)), Window(4, torch.tensor([0, 3]))
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            expected = sinks.merge(*landmark_attention(q, k, v, layout))
            out, lse = landmark_attention(q, k, v, layout, extra=sinks)
        torch.testing.assert_close(out, expected[0], **({"atol": 1e-2, "rtol": 1e-2} if half else {}))
        torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": Window(5, torch.tensor([0, 6]))}, "must lie in 0…block_size"),
        ({"layout": Window(5, None, 1)}, "must have shape"),
        ({"extra": ContextMiss(torch.zeros(1, 4), torch.zeros(2, 2, dtype=torch.bool))}, "3 or more"),
        ({"q": torch.zeros(2, 3, 9, 4), "k": torch.zeros(2, 2, 9, 4), "v": torch.zeros(2, 2, 9, 4)}, "do not divide"),
        ({"q": torch.zeros(2, 1, 9, 4).double(), "backend": "triton"}, "q must be of type torch.float32"),
        ({"scoring": Scoring(0.0), "backend": "triton"}, "backend=triton: scale must be positive, got 0"),
        (
            {"layout": Window(255), "dim": 80, "backend": "triton"},
            "255 tokens with head dimension 80 .* do not fit",
        ),
        ({"interpreted": False, "backend": "triton"}, "backend=triton needs a GPU"),
    ],
)
def test_bad_input_is_refused(change, message, monkeypatch):
    given = {name: torch.zeros(2, 1, 9, change.get("dim", 4)) for name in "qkv"} | {"layout": Window(5)} | change
    if not given.pop("interpreted", True):
        monkeypatch.delenv("TRITON_INTERPRET")
    given.pop("dim", None)
    with pytest.raises(ValueError, match=message):
        landmark_attention(**given)
    for made in (lambda: Grouped(1.5), lambda: Grouped(-0.1), lambda: Scoring(None, 0.0)):
        with pytest.raises(ValueError, match="must be"):
            made()


# ---- plain attention with a prefix, and with a log-sum-exp


@pytest.mark.parametrize("prefix", [0, 1, 7, 40])
def test_prefix_attention_equals_masked_softmax(prefix):
    q = torch.randn(2, 4, 11, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 11 + prefix, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    hidden = torch.ones(11, 11 + prefix, dtype=torch.bool).triu(prefix + 1)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ wide_k.mT / 8**0.5).masked_fill(hidden, -torch.inf)
    ours, expected = causal_attention(q, k, v, prefix=prefix), scores.softmax(-1) @ wide_v
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(a, b)
    q, k, v = q.detach().float(), k.detach().float(), v.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours = causal_attention(q, k, v, prefix=prefix)
    torch.testing.assert_close(ours, causal_attention(q.bfloat16(), k.bfloat16(), v, prefix=prefix), atol=0, rtol=0)


def test_no_weights_are_written_out():
    """Nor one mask for each head; on a GPU not even the one is read."""
    q, k, v = (torch.randn(2, 4, length, 8, requires_grad=True) for length in (30, 90, 90))
    with torch.profiler.profile(record_shapes=True) as profile:
        causal_attention(q, k, v, prefix=60).sum().backward()
    read = [shape for event in profile.events() for shape in event.input_shapes]
    assert [2, 4, 90, 8] in read
    assert not [shape for shape in read if len(shape) == 4 and shape[:3] == [2, 4, 30] and shape[3] > 8]


@pytest.mark.parametrize(("before", "window"), [(0, 9), (8, 9), (20, 9), (3, 100)])
def test_a_window_in_bfloat16(before, window, monkeypatch):
    """Against float64, in parts, whatever the processor has units for."""
    monkeypatch.setattr(attention.plain, "has_units", lambda device: True)
    monkeypatch.setattr(attention.plain, "PART", 16)
    q, k, v = (
        torch.randn(2, heads, count, 8).bfloat16() for heads, count in ((4, 40), (2, 40 + before), (2, 40 + before))
    )
    distance = before + torch.arange(40)[:, None] - torch.arange(40 + before)
    wide_k, wide_v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = (q.double() @ wide_k.mT * 0.7).masked_fill((distance < 0) | (distance >= window), -torch.inf)
    expected = scores.softmax(-1) @ wide_v
    found = attention.plain.window_attention(q, k, v, window=window, scale=0.7)
    assert (found - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("room", [0, 5])
def test_products_in_bfloat16(room, monkeypatch):
    """Against float64, in parts, with keys that are apart in memory, and far from the level."""
    monkeypatch.setattr(attention.plain, "SCORES", 300)
    q, k, v = (torch.randn(2, 3, *shape).bfloat16() for shape in ((7, 8), (40 + room, 8), (40 + room, 8)))
    k, v = k[:, :, :40], v[:, :, :40]
    scores = q.double() @ k.double().mT * 0.7
    expected, lse = scores.softmax(-1) @ v.double(), scores.logsumexp(-1)
    for off in (-2, 0, 2):
        found = attention.plain._by_products(q, k, v, 0.7, lse.float() + off)
        assert (found[0] - expected).norm() / expected.norm() < 0.01
        assert (found[1] - lse).abs().max() < 0.02
    assert attention.plain._by_products(q, k, v, 0.7, lse.float() - 100) is None
    nothing = attention.plain._by_products(q, k, v, 0.7, lse.float() + 200)
    assert not nothing[0].any()
    assert (nothing[1] == -torch.inf).all()


def test_on_a_gpu_pytorchs_kernels_return_the_log_sum_exp_and_what_they_lack_is_computed_by_others(recwarn):
    """Shapes and types alone: no GPU is needed for tensors without numbers."""

    def is_left(keys=(2, 4, 18, 16), queries=(2, 4, 11, 16), dtype=torch.float32, causal=False, device="cuda"):
        q, k = (torch.empty(shape, dtype=dtype, device=device) for shape in (queries, keys))
        if (found := attention.plain._on_gpu(q, k, k, 1.0, causal)) is None:
            return True
        out, lse = attention.plain.attention_forward(q, k, k, scale=1.0, causal=causal)
        assert out.shape == q.shape == found[0].shape
        assert (out.dtype, out.device.type, lse.shape, lse.dtype) == (dtype, "cuda", q.shape[:3], torch.float32)
        return False

    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float32):
            assert not is_left(dtype=dtype)
            assert not is_left((2, 4, 11, 16), dtype=dtype, causal=True)
        assert is_left(causal=True)  # counted from the last ones there
        assert is_left(dtype=torch.float64)
        assert is_left((2, 2, 18, 16))
        assert is_left((2, 4, 18, 15), (2, 4, 11, 15))
        assert is_left((1 << 16, 1, 18, 16), (1 << 16, 1, 1, 16))
        assert is_left(device="cpu")
    assert not [warning for warning in recwarn if "falls back" in str(warning.message)]


# ---- keys: their positions, those of the token before, and means of blocks


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_pairs_rotate_by_position_and_base_in_layers_with_positions_and_none_is_parted(fraction):
    x, keys = torch.randn(7, 8, dtype=torch.float64), Keys(rope_base=rotary_frequencies(8, 10000.0, fraction))
    for start in (0, 1900):
        expected = [oracle.rotate(x[i].numpy(), start + i, fraction) for i in range(7)]
        np.testing.assert_allclose(rotate(x, keys.rotary(0)(start, 7, x)), np.stack(expected), atol=1e-12)
    assert torch.equal(rotate(x, Keys(unrotated_layers=frozenset({1})).rotary(1)(5, 7, x)), x)
    assert rotate(x.bfloat16(), RotaryTable()(0, 7, x.bfloat16())).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="even head dimension"):
        rotary_factors(torch.arange(2), 5, 10000.0, torch.float32)
    assert [channels_of(fraction, 10) for fraction in (0, 0.25, 0.5, 0.75, 1)] == [0, 2, 4, 8, 10]


@pytest.mark.parametrize("block_size", [None, 1, 3, 6])
@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("offset", [0.0, 0.5, 1.0])
def test_offset_keys_of_windows_cut_anywhere_equal_a_plain_loop(length, block_size, offset):
    phase = torch.arange(1 if block_size is None else block_size + 1)
    k = torch.randn(len(phase), 2, length, 4, dtype=torch.float64)
    is_landmark = None if block_size is None else blocks_and_landmarks(phase, length, block_size)[1]
    out = Keys(offset).shifted(k, is_landmark)
    for sample, head in itertools.product(range(len(phase)), range(2)):
        expected = oracle.offset_keys(k[sample, head].numpy(), channels_of(offset, 4), block_size, sample)
        np.testing.assert_array_equal(out[sample, head], expected)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("length", [1, 7, 25])
@pytest.mark.parametrize("block_size", [1, 4])
def test_means_in_windows_cut_anywhere_equal_plain_loops(length, block_size, share):
    """Short first blocks, empty ones, incomplete last ones; a memory makes those of complete blocks."""
    phase, width = torch.arange(block_size + 1), block_size + 1
    k = torch.randn(len(phase), 2, length, 4, dtype=torch.float64, requires_grad=True)
    found = WindowBlocks.of(phase, length, block_size, k).add_means(k, share)
    for b, h in itertools.product(range(len(phase)), range(2)):
        expected = oracle.with_means(k[b, h].detach().numpy(), block_size, b, share)
        np.testing.assert_allclose(found[b, h].detach(), expected, atol=1e-12)
    complete = length // width * width
    of_memory = Keys(landmark="mean").with_means(k[0, :, :complete].unflatten(1, (-1, width)), share)
    torch.testing.assert_close(of_memory.flatten(1, 2), found[0, :, :complete])
    assert Keys().with_means(k) is k


def test_gradients_go_to_the_token_before_and_to_every_token_of_a_block():
    def keys(k):
        is_landmark = blocks_and_landmarks(torch.tensor([1]), 6, 3)[1]
        return WindowBlocks.of(torch.tensor([1]), 6, 3, k).add_means(Keys(0.5).shifted(k, is_landmark), 0.7)

    assert torch.autograd.gradcheck(keys, torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True))
