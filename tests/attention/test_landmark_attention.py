"""Every path computes the paper's equations, for every pair of options, with gradients of output and log-sum-exp."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from landmark.attention import (
    ContextMiss,
    Grouped,
    Packed,
    Scoring,
    Sinks,
    Window,
    blockwise,
    blockwise_tiles,
    landmark_attention,
)
from landmark.attention.inputs import AttentionInputs
from landmark.attention.layout import blocks_and_landmarks
from landmark.attention.plain import causal_attention
from landmark.attention.reference import grouped_softmax, landmark_attention_weights
from landmark.utils.window_batch import most_blocks
from tests import oracle
from tests.pairs import all_pairs, name_of

BACKENDS = ["reference", "blockwise"]
CASES = all_pairs(
    {
        "block_size": [1, 2, 5],
        "length": [1, 4, 17, 30],
        "phase": [None, "cut", "on a landmark"],
        "prefix": [0, 1, 7],
        "heads": [(1, 1), (2, 1), (4, 2)],
        "alpha": [0.0, 0.4, 1.0],
        "extra": [None, "free", "controlled", "sinks"],
        "scoring": [(None, None), (0.3, None), (None, 1.5)],
        "top_k": [None, 1, 2],
    }
)


def tensors(case, dtype=torch.float64, seed=0):
    """Leaves by name, and the arguments of `landmark_attention` made of them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    (heads, kv_heads), length, block_size = case["heads"], case["length"], case["block_size"]
    keys = case["prefix"] + length
    leaves = {"q": draw(2, heads, length, 4), "k": draw(2, kv_heads, keys, 4), "v": draw(2, kv_heads, keys, 4)}
    phase = {None: None, "cut": torch.tensor([0, block_size // 2]), "on a landmark": torch.tensor([block_size, 1])}
    layout = Window(block_size, phase[case["phase"]], case["prefix"])
    blocks, extra = most_blocks(keys, block_size), None
    if case["extra"] == "sinks":
        leaves["extra"] = draw(heads)
        extra = Sinks(leaves["extra"])
    elif case["extra"] is not None:
        leaves["extra"] = draw(kv_heads, 4)
        controlled = torch.rand(2, blocks, generator=generator) < 0.5 if case["extra"] == "controlled" else None
        extra = ContextMiss(leaves["extra"], controlled)
    options = {"gate": Grouped(case["alpha"]), "scoring": Scoring(*case["scoring"]), "top_k": case["top_k"]}
    return leaves, layout, options | {"extra": extra}


def run(case, backend, dtype=torch.float64):
    """Output, log-sum-exp, and the gradients of both."""
    leaves, layout, options = tensors(case, dtype)
    out, lse = landmark_attention(leaves["q"], leaves["k"], leaves["v"], layout, **options, backend=backend)
    generator = torch.Generator().manual_seed(1)
    of_out, of_lse = (torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype) for x in (out, lse))
    total = (out * of_out).sum() + (lse.masked_fill(lse.isinf(), 0.0) * of_lse).sum()
    gradients = torch.autograd.grad(total, leaves.values(), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


def assert_same(ours, expected, tolerance=1e-10):
    for name, x in ours.items():
        torch.testing.assert_close(x, expected[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_plain_loops_and_gradients(case):
    """The reference is plain loops; blockwise has its numbers and gradients, whatever the size of its tiles."""
    leaves, layout, options = tensors(case)
    expected = run(case, "reference")
    score = oracle.score_by(*case["scoring"])
    q, k, v = (leaves[name].detach().numpy() for name in "qkv")
    group, extra = q.shape[1] // k.shape[1], options["extra"]
    for b, h in itertools.product(range(2), range(q.shape[1])):
        own = {"score": score, "top_k": case["top_k"], "alpha": case["alpha"]}
        if isinstance(extra, Sinks):
            own["extra"] = [extra.scores[h].item()] * case["length"]
        elif extra is not None:
            own["extra"] = [score(query, extra.key[h // group].detach().numpy()) for query in q[b, h]]
            if extra.controlled is not None:
                own["controlled"] = set(extra.controlled[b].nonzero()[:, 0].tolist())
        phase = 0 if layout.phase is None else int(layout.phase[b])
        out, lse = oracle.window(q[b, h], k[b, h // group], v[b, h // group], case["block_size"], phase, **own)
        np.testing.assert_allclose(expected["out"][b, h], out, atol=1e-10)
        np.testing.assert_allclose(expected["lse"][b, h], lse, atol=1e-10)
    for size, rows in ((None, None), (1, 1), (300, 20)):
        changed = {} if size is None else {"TILE_SIZE": size, "TILE_ROWS": rows}
        with mock.patch.multiple(blockwise, **changed) if changed else mock.patch.dict({}):
            assert_same(run(case, "blockwise"), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("extra", [None, "controlled", "sinks"])
def test_gradients_are_those_of_finite_differences(backend, alpha, extra):
    """Of output and log-sum-exp, with respect to all that goes in."""
    case = {"block_size": 2, "length": 8, "phase": "cut", "prefix": 1, "heads": (1, 1), "alpha": alpha, "extra": extra}
    leaves, layout, options = tensors(case | {"scoring": (None, 1.5), "top_k": 2})

    def attend(*given):
        new = dict(zip(leaves, given, strict=True))
        replaced = dict(options)
        if extra is not None:
            replaced["extra"] = (
                Sinks(new["extra"]) if extra == "sinks" else ContextMiss(new["extra"], options["extra"].controlled)
            )
        return landmark_attention(new["q"], new["k"], new["v"], layout, **replaced, backend=backend)

    assert torch.autograd.gradcheck(attend, list(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_do_not_see_each_other(backend):
    lengths, phase = [7, 0, 1, 12], torch.tensor([6, 2, 0, 3])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(1, heads, 20, 4, dtype=torch.float64) for heads in (2, 1, 1))
    key, controlled = torch.randn(1, 4, dtype=torch.float64), torch.rand(4, 4) < 0.5
    for gate in (Grouped(), Grouped(0.5)):
        settings = {"backend": backend, "gate": gate}
        packed, _ = landmark_attention(q, k, v, Packed(6, phase, ends), extra=ContextMiss(key, controlled), **settings)
        for i, (start, end) in enumerate(itertools.pairwise(ends.tolist())):
            if start < end:
                parts = (x[:, :, start:end] for x in (q, k, v))
                extra = ContextMiss(key, controlled[i : i + 1])
                alone, _ = landmark_attention(*parts, Window(6, phase[i : i + 1]), extra=extra, **settings)
                torch.testing.assert_close(packed[:, :, start:end], alone, atol=0, rtol=0)


BASE = {"block_size": 6, "length": 40, "phase": "on a landmark", "prefix": 9, "heads": (2, 1), "alpha": 0.0}
BASE |= {"extra": None, "scoring": (None, None), "top_k": None}


@pytest.mark.parametrize("extra", [None, "controlled"])
def test_uninitialised_memory_is_never_read(extra):
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        ours = run(BASE | {"extra": extra}, "blockwise")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(ours, run(BASE | {"extra": extra}, "reference"))


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize(("batch", "queries", "prefix"), [(0, 5, 3), (2, 0, 3), (2, 0, 0)])
def test_no_sample_and_no_query_give_nothing(batch, queries, prefix, backend):
    leaves = [
        torch.randn(batch, heads, n, 4).requires_grad_() for heads, n in ((2, queries), *[(1, prefix + queries)] * 2)
    ]
    key = torch.randn(1, 4).requires_grad_()
    out, lse = landmark_attention(*leaves, Window(6, None, prefix), extra=ContextMiss(key), backend=backend)
    assert out.shape == (batch, 2, queries, 4)
    assert lse.shape == (batch, 2, queries)
    assert not any(bool(x.any()) for x in torch.autograd.grad(out.sum(), [*leaves, key]))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
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


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_under_autocast_types_may_be_mixed(backend):
    q, k, v = (torch.randn(2, heads, length, 4) for heads, length in ((2, 40), (1, 49), (1, 49)))
    settings = {"layout": Window(6, None, 9), "extra": ContextMiss(torch.randn(1, 4)), "backend": backend}
    with torch.autocast("cpu", torch.float16):
        ours, _ = landmark_attention(q, k, v.half(), **settings)
    assert ours.dtype == torch.float16
    expected, _ = landmark_attention(q.half(), k.half(), v.half(), **settings)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("alpha", "extra"), [(0.0, "controlled"), (0.5, "sinks")])
def test_half_precision_is_near_to_exact_numbers(backend, alpha, extra):
    case = BASE | {"alpha": alpha, "extra": extra}
    leaves, layout, options = tensors(case, torch.bfloat16)
    ours, _ = landmark_attention(*(leaves[n].detach() for n in "qkv"), layout, **options, backend=backend)
    assert ours.dtype == torch.bfloat16
    if isinstance(options["extra"], ContextMiss):
        options["extra"] = ContextMiss(options["extra"].key.double(), options["extra"].controlled)
    else:
        options["extra"] = Sinks(options["extra"].scores.double())
    exact, _ = landmark_attention(*(leaves[n].detach().double() for n in "qkv"), layout, **options, backend="reference")
    torch.testing.assert_close(ours.double(), exact, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    leaves, layout = torch.randn(3, 2, 2, 90, 16).to(dtype).unbind(0), Window(20, torch.tensor([0, 7]))
    exact, _ = landmark_attention(*(x.double() for x in leaves), layout, backend="reference")
    ours, _ = landmark_attention(*leaves, layout)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=float(torch.finfo(dtype).eps))


@pytest.mark.parametrize("dim", [32, 128])
def test_single_precision_error(dim):
    """Float32 stays within 5e-6 of the float64 reference, outputs and gradients of order one."""
    generator, layout, results = torch.Generator().manual_seed(3), Window(50, torch.tensor([0, 17, 50])), []
    leaves = [torch.randn(3, 2, 300, dim, dtype=torch.float64, generator=generator) for _ in range(3)]
    for backend, dtype in (("reference", torch.float64), ("blockwise", torch.float32)):
        x = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        out, _ = landmark_attention(*x, layout, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))])
    for exact, ours in zip(*results, strict=True):
        assert (ours - exact).abs().max() <= 5e-6


class LargestTensor(TorchDispatchMode):
    """The most numbers that any operation's result held in memory of its own."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_no_tensor_is_quadratic_in_the_length():
    length = 3000
    leaves = [torch.randn(1, 2, length, 8).requires_grad_() for _ in range(3)]
    fresh = mock.patch.object(blockwise_tiles, "_kept", blockwise_tiles._Kept())  # not what an earlier call has left
    with fresh, LargestTensor() as largest, mock.patch.object(blockwise, "TILE_SIZE", 1):
        landmark_attention(*leaves, Window(50))[0].sum().backward()
    assert largest.numbers <= 102 * (length + 102), "a tile"
    assert largest.numbers < length * length / 20


def weights_of(scores, block_size, phase):
    """Explicit weights, (B, H, T, T)."""
    unused = torch.zeros(())
    inputs = AttentionInputs(unused, unused, unused, None, phase, None, None, block_size, 0, 1.0)
    return landmark_attention_weights(scores, inputs)[0]


def test_weights_sum_to_one_and_landmarks_weigh_nothing():
    phase = torch.tensor([0, 3, 5])
    weights = weights_of(torch.randn(3, 2, 17, 17, dtype=torch.float64), 5, phase)
    sums = weights.sum(-1)
    assert sums[2, :, 0].eq(0).all(), "the landmark of an empty first block attends to nothing"
    sums[2, :, 0] = 1
    torch.testing.assert_close(sums, torch.ones_like(sums))
    _, is_landmark = blocks_and_landmarks(phase, 17, 5)
    assert weights.movedim(-1, 1)[is_landmark].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_of_the_context_miss_token_goes_to_its_landmarks_or_nowhere(backend):
    """Values of one: the output is the sum of weights, 1 where a controlled landmark is seen and 1 − S elsewhere."""
    q, k = torch.randn(2, 1, 2, 17, 4, dtype=torch.float64)
    cmt, controlled = torch.randn(2, 4, dtype=torch.float64), torch.tensor([[False, True, False, False]])
    out, lse = landmark_attention(
        q, k, torch.ones_like(q), Window(5), extra=ContextMiss(cmt, controlled), backend=backend
    )
    weight = (torch.einsum("bhtd,hd->bht", q, cmt) / 2 - lse).exp()
    sees = torch.arange(17) >= 12  # the landmark at 11, from the next block on
    torch.testing.assert_close(out[..., 0], torch.where(sees, 1.0, 1 - weight))


def test_worked_example_of_appendix_a():
    """Blocks of two tokens: a b L c d L e. Groups and products as the paper draws them for the last token."""
    scores = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    scores[0, 0, 6] = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.0, 1.5, 0.25]).log1p().nan_to_num(neginf=-30.0)
    weights = weights_of(scores, 2, torch.tensor([0]))
    e = scores[0, 0, 6].exp()
    outer, first, second, none = e[2] + e[5] + e[6], e[0] + e[1], e[3] + e[4], torch.zeros_like(e[0])
    shares = [e[0] / first * e[2], e[1] / first * e[2], none, e[3] / second * e[5], e[4] / second * e[5], none, e[6]]
    torch.testing.assert_close(weights[0, 0, 6], torch.stack(shares) / outer)


def test_window_cut_on_a_landmark():
    q, k, v = torch.randn(3, 2, 1, 9, 4, dtype=torch.float64)
    layout = Window(3, torch.tensor([3, 0]))
    out, _ = landmark_attention(q, k, v, layout)
    assert out[0, 0, 0].eq(0).all()
    assert out.isfinite().all()
    k[0, 0, 0] += 100.0
    v[0, 0, 0] += 100.0
    torch.testing.assert_close(landmark_attention(q, k, v, layout)[0][0], out[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_landmarks_that_say_nothing_make_a_joint_softmax_plain_attention(backend):
    """So the landmarks only have to say what plain attention does not know."""
    q, k, v = torch.randn(3, 2, 2, 41, 8, dtype=torch.float64)
    is_landmark = torch.arange(41) % 5 == 4
    k[:, :, is_landmark] = 0.0
    out, _ = landmark_attention(q, k, v, Window(4), gate=Grouped(1.0), backend=backend)
    plain = causal_attention(*(x[:, :, ~is_landmark] for x in (q, k, v)))
    torch.testing.assert_close(out[:, :, ~is_landmark], plain, atol=1e-12, rtol=0)
    grouped, _ = landmark_attention(q, k, v, Window(4), backend=backend)
    assert not torch.allclose(grouped[:, :, ~is_landmark], plain)


def test_as_many_best_blocks_as_there_are_change_nothing():
    q, k, v = torch.randn(3, 2, 2, 40, 8, dtype=torch.float64)
    found, _ = landmark_attention(q, k, v, Window(3), top_k=10)
    torch.testing.assert_close(found, landmark_attention(q, k, v, Window(3))[0])


def test_a_query_reads_the_best_blocks_as_from_a_memory():
    """The first query after some complete blocks finds them all in a memory. No channel turns."""
    from landmark.attention.keys import Keys
    from landmark.memory.construction import memory_of
    from landmark.memory.settings import MemorySettings

    q, k, v = torch.randn(3, 1, 2, 25, 8, dtype=torch.float64)
    memory = memory_of(3, MemorySettings(k=2, mapping="true"), keys=Keys(rope_base=torch.zeros(4)))
    memory.attend(1, q[:, :, :24], k[:, :, :24], v[:, :, :24])
    memory.commit()
    read = memory.attend(1, q[:, :, 24:], k[:, :, 24:], v[:, :, 24:])
    torch.testing.assert_close(read, landmark_attention(q, k, v, Window(3), top_k=2)[0][:, :, 24:])


def test_sinks_merge_into_a_softmax_that_is_computed_already():
    q, k, v = torch.randn(3, 2, 2, 31, 8, dtype=torch.float64)
    sinks, layout = Sinks(torch.randn(2, dtype=torch.float64)), Window(4, torch.tensor([0, 3]))
    expected = sinks.merge(*landmark_attention(q, k, v, layout))
    for ours, theirs in zip(landmark_attention(q, k, v, layout, extra=sinks), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_scores_of_sinks_keep_their_precision_beside_half_precision():
    """Under autocast q is bfloat16; a score between two of its numbers is not rounded."""
    q, k, v = torch.randn(3, 2, 4, 31, 8)
    sinks = torch.full((4,), 8.0 + 1 / 64)  # rounded it would be 8
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = landmark_attention(q, k, v, Window(4), backend="blockwise")
        _, found = landmark_attention(q, k, v, Window(4), extra=Sinks(sinks), backend="blockwise")
    torch.testing.assert_close(found, torch.logaddexp(lse, sinks[:, None]), rtol=0, atol=1e-3)


def test_strided_inputs_need_no_copy_from_the_caller():
    qkv = torch.randn(2, 30, 3, 4, 8, dtype=torch.float64)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    expected = landmark_attention(q.contiguous(), k.contiguous(), v.contiguous(), Window(6))
    torch.testing.assert_close(landmark_attention(q, k, v, Window(6)), expected)


def test_grouped_softmax_of_one_group_is_softmax():
    scores = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(grouped_softmax(scores, torch.zeros(7, dtype=torch.int64), 1), scores.softmax(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": Window(0)}, "block_size must be at least 1"),
        ({"layout": Window(5, torch.tensor([0, 6]))}, "must lie in 0…block_size"),
        ({"layout": Window(5, torch.tensor([0]))}, "one number for each sample"),
        ({"layout": Window(5, None, 1)}, "must have shape"),
        ({"layout": Packed(5, None, torch.tensor([0, 9]))}, "one row, got 2 rows"),
        ({"backend": "magic"}, "backend must be one of"),
        ({"extra": ContextMiss(torch.zeros(2, 4))}, "context miss token needs a key"),
        ({"extra": ContextMiss(torch.zeros(1, 4), torch.zeros(2, 2, dtype=torch.bool))}, "3 or more"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_k": 1, "backend": "triton"}, "backend='triton'"),
        ({"scoring": Scoring(None, 1.0), "backend": "triton"}, "backend='triton'"),
    ],
)
def test_bad_input_is_refused(change, message):
    q, k, v = torch.randn(3, 2, 1, 9, 4)
    with pytest.raises(ValueError, match=message):
        landmark_attention(q, k, v, **{"layout": Window(5), **change})


def test_numbers_out_of_range_are_refused():
    for made in (lambda: Grouped(1.5), lambda: Grouped(-0.1), lambda: Scoring(None, 0.0)):
        with pytest.raises(ValueError, match="must be"):
            made()
    q, k, v = (torch.randn(1, heads, 5, 4) for heads in (3, 2, 2))
    with pytest.raises(ValueError, match="do not divide"):
        landmark_attention(q, k, v, Window(5))
