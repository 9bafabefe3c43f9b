"""A part of the log-sum-exp of each block's scores in its gate: against plain loops, and plain attention."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.attention import landmark_attention
from landmark.attention.causal import causal_attention
from landmark.attention.landmark_keys import WindowBlocks, bias_landmarks
from landmark.attention.layout import blocks_and_landmarks
from landmark.models import Decoder, DecoderConfig
from landmark.utils.errors import UserError
from tests import naive

SHAPE = {"vocab_size": 20, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}


@given(
    length=st.integers(1, 40),
    block_size=st.integers(1, 5),
    phases=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    prefix=st.integers(0, 6),
    top_k=st.one_of(st.none(), st.integers(1, 4)),
    local_blocks=st.integers(0, 2),
    bidirectional=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    share=st.sampled_from([0.3, 1.0]),
    backend=st.sampled_from(["reference", "blockwise"]),
)
@settings(max_examples=150, deadline=None)
def test_output_equals_plain_loops(
    length, block_size, phases, prefix, top_k, local_blocks, bidirectional, softcap, has_sinks, share, backend
):
    phase = torch.tensor([min(each, block_size) for each in phases])
    prefix, has_sinks = (0, False) if bidirectional else (prefix, has_sinks)
    q = torch.randn(len(phase), 1, length, 4, dtype=torch.float64)
    k, v = torch.randn(2, len(phase), 1, prefix + length, 4, dtype=torch.float64)
    sinks = torch.randn(1, dtype=torch.float64) if has_sinks else None
    options = {"prefix": prefix, "top_k": top_k, "local_blocks": local_blocks, "bidirectional": bidirectional}
    options |= {"softcap": softcap, "joint_softmax": share}
    both = {"block_size": block_size, "phase": phase, "backend": backend, "return_lse": True}
    out, lse = landmark_attention(q, k, v, sinks=sinks, **both, **options)
    if sinks is not None:  # takes its share of the weight, and has no value
        out = out / (1 - (sinks - lse).exp())[..., None].clamp(min=1e-300)
    for b in range(len(phase)):
        q_b, k_b, v_b = (x[b, 0].numpy() for x in (q, k, v))
        expected = naive.landmark_attention(q_b, k_b, v_b, block_size, int(phase[b]), **options)
        np.testing.assert_allclose(out[b, 0], expected, atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_landmarks_that_say_nothing_make_it_plain_attention(backend):
    """So the landmarks only have to say what plain attention does not know."""
    q, k, v = torch.randn(3, 2, 2, 41, 8, dtype=torch.float64)
    _, is_landmark = blocks_and_landmarks(torch.tensor([0]), 41, 4)
    normal = ~is_landmark[0]
    k[:, :, is_landmark[0]] = 0.0
    out = landmark_attention(q, k, v, block_size=4, joint_softmax=1, backend=backend)
    plain = causal_attention(*(x[:, :, normal] for x in (q, k, v)))
    torch.testing.assert_close(out[:, :, normal], plain, atol=1e-12, rtol=0)
    assert not torch.allclose(landmark_attention(q, k, v, block_size=4, backend=backend)[:, :, normal], plain)


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"local_blocks": 1}, {"sinks": True}, {"softcap": 1.5}])
def test_gradients_of_both_backends_are_equal(options, share):
    leaves = [torch.randn(2, 2, 33, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    if options.get("sinks"):
        leaves.append(torch.randn(2, dtype=torch.float64, requires_grad=True))
        options = {}
    common = {"block_size": 3, "phase": torch.tensor([1, 3]), "joint_softmax": share, **options}
    found = []
    for backend in ("reference", "blockwise"):
        q, k, v, *sinks = leaves
        out = landmark_attention(q, k, v, sinks=sinks[0] if sinks else None, backend=backend, **common)
        found.append(torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaves))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_gradients_are_those_of_finite_differences(share):
    leaves = [torch.randn(1, 1, 14, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    options = {"block_size": 2, "phase": torch.tensor([0]), "joint_softmax": share, "backend": "blockwise"}
    assert torch.autograd.gradcheck(lambda *x: landmark_attention(*x, **options, return_lse=True), leaves)


@pytest.mark.parametrize(("masked", "share"), [(False, 0.5), (False, 1.0), (True, 0.5), (True, 1.0)])
def test_a_model_learns_and_reads_with_it(masked, share):
    """In chunks as in a window, where all blocks are retrieved; the setting changes what a model computes."""
    keys = {"key_offset": 0.5, "rotary_fraction": 0.5, "landmark_key": "mean", "qk_norm": True, "masked": masked}
    joint, grouped = (
        Decoder(DecoderConfig("landmark", landmark_id=19, block_size=3, joint_softmax=each, **SHAPE, **keys)).double()
        for each in (share, 0.0)
    )
    grouped.load_state_dict(joint.state_dict())
    tokens = torch.randint(0, 18, (2, 27))
    logits = joint(tokens)
    assert (logits - grouped(tokens)).abs().amax() > 1e-3
    logits.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in joint.parameters())
    if not masked:
        memory = joint.new_memory(k=9)
        in_chunks = torch.cat([joint(part, memory=memory) for part in tokens.split(5, 1)], 1)
        torch.testing.assert_close(in_chunks, logits, atol=1e-10, rtol=0)


def test_what_has_gates_of_its_own_is_refused():
    q, k, v = torch.randn(3, 1, 1, 9, 4)
    with pytest.raises(ValueError, match="joint_softmax: leave out hierarchy, gates, cmt and landmark_values"):
        landmark_attention(q, k, v, block_size=2, joint_softmax=0.5, cmt=torch.randn(1, 4))
    with pytest.raises(ValueError, match=r"joint_softmax=1.5: must be from 0 to 1"):
        landmark_attention(q, k, v, block_size=2, joint_softmax=1.5)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("transformer", {}, "model.joint_softmax=0.5: is for model=landmark without cmt"),
        ("landmark", {"cmt": True}, "model.joint_softmax=0.5: is for model=landmark without cmt"),
        ("landmark", {"fan_out": 2}, "model.joint_softmax=0.5: is for model=landmark without cmt"),
        ("landmark", {"joint_softmax": -1.0}, "model.joint_softmax=-1.0: must be from 0 to 1, 0 the paper's"),
        ("landmark", {"joint_softmax": None}, "model.joint_softmax=None: must be from 0 to 1"),
        ("landmark", {"joint_softmax": 5.0, "cmt": True}, "model.joint_softmax=5.0: must be from 0 to 1"),
    ],
)
def test_models_without_it_say_so(kind, settings, said):
    with pytest.raises(UserError, match=said):
        DecoderConfig(kind, landmark_id=19, block_size=3, **SHAPE, **({"joint_softmax": 0.5} | settings))


def test_earlier_files_have_true_for_one():
    q, k, v = torch.randn(3, 1, 1, 9, 4, dtype=torch.float64)
    earlier, now = (landmark_attention(q, k, v, block_size=2, joint_softmax=value) for value in (True, 1.0))
    assert torch.equal(earlier, now)
    config = DecoderConfig("landmark", landmark_id=19, block_size=3, joint_softmax=True, **SHAPE)
    assert type(config.joint_softmax) is float
    assert config.joint_softmax == 1
    model = Decoder(config)
    tokens = torch.randint(0, 18, (1, 9))
    assert model(tokens, memory=model.new_memory(k=2)).isfinite().all()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("summary", ["mean", "pooled"])
@pytest.mark.parametrize("score", [0.0, 1.5])
def test_with_equal_scores_it_is_full_attention(summary, share, score):
    """A landmark with its summary, log ℓ or the entropy, and no key of its own, weighs as much as its tokens."""
    block_size, length, channel = 3, 12, 8**0.5 * score
    is_landmark = (torch.arange(length) + 1) % (block_size + 1) == 0
    q, k = torch.zeros(2, 1, 1, length, 8, dtype=torch.float64)
    q[..., 0], k[..., 0], v = 1, channel * ~is_landmark, torch.randn(1, 1, length, 8, dtype=torch.float64)
    bias = (1 - share) * math.log(block_size) * (summary == "mean") * torch.ones(1, dtype=torch.float64)
    q, k = bias_landmarks(q, k, is_landmark[None], bias)
    blocks = WindowBlocks.of(torch.zeros(1, dtype=torch.int64), length, block_size, k)
    k = blocks.add_means(k, 1 - share) if summary == "mean" else blocks.add_pooled(q, k, 1 - share)
    out = landmark_attention(q, k, v, block_size=block_size, joint_softmax=share)
    normal = ~is_landmark
    means = v[:, :, normal].cumsum(2) / torch.arange(1, 10)[:, None]  # of all tokens before, weighed alike
    torch.testing.assert_close(out[:, :, normal], means)


@pytest.mark.parametrize("summary", ["mean", "pooled"])
def test_summaries_count_by_the_rest_in_chunks_as_in_a_window(summary):
    """What is added to a landmark's key is the same in a window and in a memory, whatever part of it is added."""
    keys = {"key_offset": 0.5, "rotary_fraction": 0.5, "landmark_key": summary, "landmark_bias": True}
    config = DecoderConfig("landmark", landmark_id=19, block_size=3, joint_softmax=0.3, **SHAPE, **keys)
    model = Decoder(config).double()
    tokens = torch.randint(0, 18, (2, 27))
    memory = model.new_memory(k=9)
    in_chunks = torch.cat([model(part, memory=memory) for part in tokens.split(4, 1)], 1)
    torch.testing.assert_close(in_chunks, model(tokens), atol=1e-10, rtol=0)
