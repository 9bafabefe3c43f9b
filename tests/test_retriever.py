"""Blocks and documents by their landmarks, against the same scores put together by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from landmark.attention.layout import insert_landmarks
from landmark.attention.rotary import RotaryTable, rotate
from landmark.data.named_tokenizers import load_tokenizer
from landmark.memory import Memory
from landmark.models import Decoder, DecoderConfig
from landmark.retriever import WINDOW, Retriever
from landmark.utils.errors import UserError

TOKENIZER = load_tokenizer("bytes")
BLOCK = 8
TEXTS = {
    "birds": "The heron stands in the shallow water and waits. " * 3,
    "ships": "A schooner with two masts left the harbour at dawn. " * 4,
    "short": "Tiny, é.",
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = DecoderConfig("landmark", 320, 2, 4, 16, 64, num_kv_heads=2, landmark_id=257, block_size=BLOCK)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model


class Listener(Memory):
    """Records the inputs of each layer."""

    def attend(self, layer, q, k, v, cmt=None):
        self.__dict__.setdefault("heard", {})[layer] = q, k
        return super().attend(layer, q, k, v, cmt)


def heard(model, ids):
    memory = Listener(BLOCK, k=0)
    model(torch.from_numpy(ids)[None], memory=memory)
    return memory.heard


def by_hand(model, text):
    """Scores of every head for every block: each landmark stands in the block just before the text."""
    table, landmarks = RotaryTable(), {}
    for document in TEXTS.values():
        ids = TOKENIZER.encode(document).astype(np.int64)
        ids = np.pad(ids, (0, -len(ids) % BLOCK), constant_values=TOKENIZER.eot)
        for start in range(0, len(ids), WINDOW * BLOCK):
            for layer, (_, keys) in heard(model, ids[start : start + WINDOW * BLOCK]).items():
                landmarks.setdefault(layer, []).append(keys[0, :, BLOCK :: BLOCK + 1])
    found = {}
    for layer, (queries, _) in heard(model, TOKENIZER.encode(text).astype(np.int64)).items():
        keys = rotate(torch.cat(landmarks[layer], 1), table(BLOCK, 1, queries))
        queries = rotate(queries[0], table(BLOCK + 1, queries.shape[2], queries))
        for head in range(4):
            scores = queries[head] @ keys[head // 2].mT / math.sqrt(16)
            found[layer, head] = scores.log_softmax(-1).mean(0)
    return found


def test_scores_are_softmaxes_over_landmarks(model):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    expected = by_hand(model, "masts and herons, both")
    found = retriever.head_scores("masts and herons, both")
    assert found.keys() == expected.keys()
    for head in expected:
        torch.testing.assert_close(found[head], expected[head])
    mean = torch.stack(list(expected.values())).mean(0)
    torch.testing.assert_close(retriever.scores("masts and herons, both"), mean)
    some = Retriever(model, TOKENIZER, heads=[(1, 2), (0, 3)])
    some.index(TEXTS)
    torch.testing.assert_close(some.scores("masts and herons, both"), (expected[1, 2] + expected[0, 3]) / 2)


def test_spans_are_parts_of_the_documents(model):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    spans = retriever.query("heron", count=1000)
    assert len(spans) == len(retriever) == sum(-(-len(text.encode()) // BLOCK) for text in TEXTS.values())
    assert [span.score for span in spans] == sorted((span.score for span in spans), reverse=True)
    for name, text in TEXTS.items():
        parts = sorted((span for span in spans if span.document == name), key=lambda span: span.start)
        assert parts[0].start == 0
        assert parts[-1].stop == len(text.encode())
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert all(span.text == text.encode()[span.start : span.stop].decode(errors="replace") for span in parts)
    assert retriever.query("heron", count=2) == spans[:2]


def test_a_document_is_as_relevant_as_its_best_block(model):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    spans = retriever.query("two masts", count=1000)
    found = retriever.documents("two masts")
    assert found == sorted(found, key=lambda item: -item[1])
    assert dict(found) == {name: max(s.score for s in spans if s.document == name) for name in TEXTS}


def test_documents_may_be_added_later(model):
    at_once, bit_by_bit = Retriever(model, TOKENIZER), Retriever(model, TOKENIZER)
    at_once.index(TEXTS)
    for item in TEXTS.items():
        bit_by_bit.index([item])
    assert [span.start for span in at_once.query("dawn")] == [span.start for span in bit_by_bit.query("dawn")]
    torch.testing.assert_close(at_once.scores("dawn"), bit_by_bit.scores("dawn"))


def test_a_model_of_transformers_retrieves_as_its_memory_scores():
    pytest.importorskip("transformers")
    from landmark.huggingface import wrap
    from landmark.huggingface.families import inverse_frequencies
    from tests.huggingface.conftest import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    wrapped = wrap(make_model("gemma3"), tokenizer, block_size=BLOCK)
    retriever = Retriever(wrapped, tokenizer)
    retriever.index(TEXTS)
    assert {layer for layer, _ in retriever.head_scores("heron")} == {1, 2}  # layer 0 slides
    frequency, text = inverse_frequencies(wrapped).double(), "A schooner with"
    ids = torch.tensor([tokenizer(TEXTS["short"])["input_ids"]])
    tokens, _ = insert_landmarks(ids, 0, BLOCK, wrapped.landmarks.token)
    assert tokens[0, BLOCK] == wrapped.landmarks.token
    with torch.no_grad():
        cache = wrapped.new_memory(k=0)
        wrapped(ids, past_key_values=cache)
        kept = cache.memory.layers[1].store.landmarks[0, :, :1].double()
        alone = Retriever(wrapped, tokenizer)
        alone.index({"short": TEXTS["short"]})
        torch.testing.assert_close(alone._landmarks[1][:, :1].double(), kept, rtol=0, atol=1e-5)
    assert len(frequency) * 2 == kept.shape[-1]
    assert retriever.query(text)[0].score >= retriever.query(text)[-1].score


def test_invalid_documents_texts_heads_and_models_are_refused(model):
    retriever = Retriever(model, TOKENIZER)
    with pytest.raises(UserError, match="index is empty"):
        retriever.query("anything")
    with pytest.raises(UserError, match=r"blank: the document has no text"):
        retriever.index({"blank": ""})
    retriever.index(TEXTS)
    with pytest.raises(UserError, match="text is empty"):
        retriever.query("")
    retriever.heads = [(0, 1), (7, 0)]
    with pytest.raises(UserError, match=r"heads=\[\(7, 0\)\]"):
        retriever.query("anything")
    with pytest.raises(UserError, match="no landmarks to retrieve by"):
        Retriever(Decoder(DecoderConfig("transformer", 320, 1, 2, 8, 32)), TOKENIZER)
