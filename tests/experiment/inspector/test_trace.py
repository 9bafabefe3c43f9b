"""A trace against plain loops over the definitions, layer by layer."""

import numpy as np
import pytest
import torch

from landmark.experiment.inspector import trace as trace_module
from landmark.experiment.inspector.trace import NO_BLOCK, trace_retrieval
from landmark.memory import Memory
from landmark.memory.landmarks.settings import GRANULARITIES
from landmark.models.huggingface import wrap
from landmark.models.pretrained import Pretrained
from landmark.utils.errors import UserError
from tests import oracle
from tests.experiment.inspector.conftest import BLOCK, HEADS, LAYERS, LOCAL, model_of
from tests.models.huggingface.conftest import make_model, make_tokenizer

K = 3


@pytest.fixture
def projections(monkeypatch):
    """Queries, keys and values of all chunks, by layer, as the model's attention gets them."""
    seen = {}
    attend = Memory.attend

    def watched(self, layer, q, k, v, extra=None):
        seen.setdefault(layer, []).append((q[0], k[0], v[0], extra))
        return attend(self, layer, q, k, v, extra)

    monkeypatch.setattr(Memory, "attend", watched)
    return seen


OTHERS = [
    {},
    {"max_blocks": 4},
    {"cutoff": 0.0},
    {"cutoff": 0.15, "max_blocks": 6},
]  # with a cutoff: a cmt; it may drop


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_it_equals_plain_loops(tokens, projections, granularity, settings):
    tokens, cmt_is_on = tokens[:62], "cutoff" in settings
    found = trace_retrieval(model_of(cmt=cmt_is_on), tokens, LOCAL, k=K, granularity=granularity, **settings)
    length = len(tokens) + len(tokens) // BLOCK
    assert found.blocks.shape == found.weights.shape == (LAYERS, HEADS, K, length)
    chunks = np.diff([*found.chunks, length]).tolist()
    dropped = 0
    for layer in range(LAYERS):
        q, k, v = (torch.cat(parts, 1).double().numpy() for parts in list(zip(*projections[layer]))[:3])
        extra = projections[layer][0][3]
        reader = oracle.Memory(
            BLOCK,
            oracle.Selector(K, granularity),
            max_blocks=settings.get("max_blocks"),
            tied=layer == 0,
            cmt=None if extra is None else extra.key.detach().double().numpy(),
            cutoff=settings.get("cutoff", 0.0),
            kv_heads=HEADS,
        )
        reader.read(q, k, v, chunks)
        for head in range(HEADS):
            for position in range(length):
                blocks, missed = reader.found[head, position]
                here = found.blocks[layer, head, :, position]
                kept = dict(zip(here.tolist(), found.weights[layer, head, :, position].tolist()))
                assert not kept.pop(NO_BLOCK, 0), "no block has no weight"
                assert kept == pytest.approx(blocks, abs=1e-5)
                assert list(kept) == sorted(kept), "the oldest first"
                if missed is not None:
                    assert found.cmt_weights[layer, head, position] == pytest.approx(missed, abs=1e-5)
                    dropped += not kept and position >= found.chunks[1]
    if settings.get("cutoff"):
        assert 0 < dropped < LAYERS * HEADS * (length - found.chunks[1])
    assert (found.cmt_weights is None) == (not cmt_is_on)


def test_losses_are_those_of_the_next_tokens_and_a_trace_that_no_page_can_show_is_refused(tokens, monkeypatch):
    model, calls = model_of(), []
    found = trace_retrieval(model, tokens, LOCAL, progress=lambda *now: calls.append(now))
    assert (calls[0], calls[-1]) == ((LOCAL, len(tokens)), (len(tokens), len(tokens)))
    memory = model.new_memory()
    with torch.no_grad():
        parts = torch.from_numpy(tokens.astype(np.int64))[None].split(LOCAL, 1)
        chances = torch.cat([model(part, memory=memory) for part in parts], 1)[0].softmax(-1)
    expected = [-float(chances[at, token].log()) for at, token in enumerate(tokens[1:].tolist())]
    np.testing.assert_allclose(found.losses, expected, atol=1e-5)
    monkeypatch.setattr(trace_module, "MAX_RETRIEVALS", 4 * 4 * 80)
    said = f"has {len(tokens)} tokens, a page holds 80, .* with retrieval.k=4: give a part"
    with pytest.raises(UserError, match=said):
        trace_retrieval(model_of(), tokens, LOCAL)


@pytest.mark.parametrize(
    ("model", "count", "local", "k", "message"),
    [
        ({}, LOCAL, LOCAL, 4, "18 tokens, read 18 at a time .* give one of more than 18, or lower eval.local"),
        ({}, 6, 3, 4, "give one of more than 6"),
        ({}, 99, LOCAL, 0, "retrieval.k=0: nothing is retrieved"),
        ({"kind": "transformer"}, 99, LOCAL, 4, "a transformer has no blocks to retrieve"),
    ],
)
def test_a_text_without_anything_to_retrieve_is_refused(tokens, model, count, local, k, message):
    with pytest.raises(UserError, match=message):
        trace_retrieval(model_of(**model), tokens[:count], local, k=k)
    if "give" in message:  # one token more is enough
        assert (trace_retrieval(model_of(), tokens[: count + 1], local).blocks == 0).any()


def test_a_model_without_landmarks_is_traced_too():
    """Where every block is read, a block's share is that of its tokens in the model's own attention."""
    model = make_model("llama").double()
    model.set_attn_implementation("eager")
    text = np.arange(1, 61) * 7 % 200
    with torch.no_grad():
        attentions = model(torch.tensor(text)[None], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    wrapped = wrap(model, make_tokenizer(), landmarks="none", block_size=5, memory={"window": 7})
    found = trace_retrieval(Pretrained(wrapped), text, LOCAL, k=12)
    assert (found.width, found.chunks) == (5, [*range(0, 60, 5)])
    assert found.visible == [0, 0, *range(0, 50, 5)]
    assert found.blocks.shape[2:] == (12, 60)
    for layer, head, position in np.ndindex(*found.blocks.shape[:2], len(text)):
        expected = attentions[layer][0, head, position].view(-1, 5).sum(-1)[: found.visible[position // 5] // 5]
        there = dict(zip(found.blocks[layer, head, :, position], found.weights[layer, head, :, position]))
        assert not there.pop(NO_BLOCK, 0)
        assert there == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)
    with pytest.raises(UserError, match="give one of more than 15"):  # which a window holds
        trace_retrieval(Pretrained(wrapped), np.arange(12), 6)
