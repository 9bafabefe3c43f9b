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
from landmark.memory.select.scores import SCORED_AT_ONCE
from landmark.models import Decoder
from landmark.retriever import WINDOW, Retriever, split_into_blocks
from landmark.utils.errors import UserError
from tests.configurations import decoder_config
from tests.flips import flipped

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
    config = decoder_config("landmark", 320, 2, 4, 16, 64, num_kv_heads=2, landmark_id=257, block_size=BLOCK)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model


class Listener(Memory):
    """Records the inputs of each layer."""

    def attend(self, layer, q, k, v, extra=None):
        self.__dict__.setdefault("heard", {})[layer] = q, k
        return super().attend(layer, q, k, v, extra)


def heard(model, ids):
    memory = Listener(BLOCK, k=0)
    model(torch.from_numpy(ids)[None], memory=memory)
    return memory.heard


def by_hand(model, text, scorer="landmark"):
    """Scores of every head for every block: each landmark, or each token, stands in the block just before the text."""
    table, kept = RotaryTable(), {}
    places = [BLOCK] if scorer == "landmark" else range(BLOCK)  # the mean of what is turned is not turned again
    for document in TEXTS.values():
        ids = TOKENIZER.encode(document).astype(np.int64)
        ids = np.pad(ids, (0, -len(ids) % BLOCK), constant_values=TOKENIZER.eot)
        for start in range(0, len(ids), WINDOW * BLOCK):
            for layer, (_, keys) in heard(model, ids[start : start + WINDOW * BLOCK]).items():
                of_blocks = keys[0].unflatten(1, (-1, BLOCK + 1))
                turned = [rotate(of_blocks[:, :, place], table(place, 1, keys)) for place in places]
                kept.setdefault(layer, []).append(torch.stack(turned, 2))
    found = {}
    for layer, (queries, _) in heard(model, TOKENIZER.encode(text).astype(np.int64)).items():
        keys = torch.cat(kept[layer], 1)
        keys = keys.mean(2, keepdim=True) if scorer == "mean_key" else keys
        queries = rotate(queries[0], table(BLOCK + 1, queries.shape[2], queries))
        for head in range(4):
            scores = torch.einsum("td,bnd->tbn", queries[head], keys[head // 2]) / math.sqrt(16)
            weights = scores.exp().sum(-1)
            found[layer, head] = (weights / weights.sum(-1, keepdim=True)).log().mean(0)
    return found


@pytest.mark.parametrize("at_once", [1 << 25, 1])
@pytest.mark.parametrize("scorer", ["landmark", "mean_key", "tokens"])
def test_scores_are_softmaxes_over_blocks(model, scorer, at_once, monkeypatch):
    monkeypatch.setitem(SCORED_AT_ONCE, "cpu", at_once)
    retriever = Retriever(model, TOKENIZER, scorer=scorer)
    retriever.index(TEXTS)
    expected = by_hand(model, "masts and herons, both", scorer)
    found = retriever.head_scores("masts and herons, both")
    assert found.keys() == expected.keys()
    for head in expected:
        torch.testing.assert_close(found[head], expected[head])
    mean = torch.stack(list(expected.values())).mean(0)
    torch.testing.assert_close(retriever.scores("masts and herons, both"), mean)
    some = Retriever(model, TOKENIZER, heads=[(1, 2), (0, 3)], scorer=scorer)
    some.index(TEXTS)
    torch.testing.assert_close(some.scores("masts and herons, both"), (expected[1, 2] + expected[0, 3]) / 2)


def test_spans_are_parts_of_the_documents(model):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    spans = retriever.query("heron", count=len(retriever))
    assert len(spans) == len(retriever) == sum(-(-len(text.encode()) // BLOCK) for text in TEXTS.values())
    assert [span.score for span in spans] == sorted((span.score for span in spans), reverse=True)
    for name, text in TEXTS.items():
        parts = sorted((span for span in spans if span.document == name), key=lambda span: span.start)
        assert parts[0].start == 0
        assert parts[-1].stop == len(text)
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert all(span.text == text[span.start : span.stop] for span in parts)
    assert retriever.query("heron", count=2) == spans[:2]


def test_a_document_is_as_relevant_as_its_best_block(model):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    spans = retriever.query("two masts", count=len(retriever))
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
        torch.testing.assert_close(alone._keys[1][:, :1, 0].double(), kept, rtol=0, atol=1e-5)
    assert len(frequency) * 2 == kept.shape[-1]
    scores, found = retriever.scores(text), retriever.query(text)
    best = scores.argsort(descending=True)[: len(found)].tolist()
    assert [(block.document, block.start) for block in found] == [
        (retriever.blocks[number].document, retriever.blocks[number].start) for number in best
    ]


def test_a_model_without_landmarks_is_asked_by_its_mean_keys(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    from landmark.huggingface import wrap
    from tests.huggingface.conftest import make_model, make_tokenizer

    heard, attend = [], Memory.attend
    monkeypatch.setattr(Memory, "attend", lambda self, *given: heard.append(given[:3]) or attend(self, *given))
    tokenizer = make_tokenizer()
    wrapped = wrap(make_model("llama").double(), tokenizer, landmarks="none", block_size=BLOCK)
    retriever = Retriever(wrapped, tokenizer)
    retriever.index({"one": "A schooner left the harbour at dawn, and a heron waited."[: 6 * BLOCK]})
    keys = {layer: k[0] for layer, _, k in heard}
    heard.clear()
    found = retriever.head_scores("a heron waits")
    assert {layer for layer, _ in found} == set(keys) == {layer for layer, *_ in heard}
    for layer, queries, _ in heard:
        rotary = wrapped.new_memory().memory.keys.rotary(layer)
        blocks = rotate(keys[layer].unflatten(1, (-1, BLOCK)), rotary(0, BLOCK, queries)).mean(2)  # (H_kv, 6, d)
        asked = rotate(queries[0], rotary(BLOCK, queries.shape[2], queries))
        for head, q in enumerate(asked):
            scores = q @ blocks[head * len(blocks) // len(asked)].mT / math.sqrt(q.shape[-1])
            torch.testing.assert_close(found[layer, head], scores.log_softmax(-1).mean(0))
    retriever.save(tmp_path / "index")
    again = Retriever(wrapped, tokenizer)
    again.load(tmp_path / "index")
    assert again.query("a heron waits") == retriever.query("a heron waits")
    with pytest.raises(UserError, match="reads without landmarks: take scorer=mean_key, or tokens"):
        Retriever(wrapped, tokenizer, scorer="landmark")


@pytest.mark.parametrize("change", ["index", "replace"])
def test_a_change_that_fails_changes_nothing(model, change):
    """Half of the new documents would otherwise leave texts beside the landmarks of other texts."""
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    before, found = list(retriever.blocks), retriever.scores("heron")
    bad = {"birds" if change == "replace" else "fish": "A pike waits in the reeds. ", "blank": ""}
    with pytest.raises(UserError, match="blank: the document has no text"):
        getattr(retriever, change)(bad)
    assert retriever.blocks == before
    assert torch.equal(retriever.scores("heron"), found)
    with pytest.raises(UserError, match="birds: a document of this name"):
        retriever.index({"fish": "A pike waits.", "birds": "again"})
    with pytest.raises(UserError, match="nothing: no document of this name"):
        retriever.delete("birds", "nothing")
    with pytest.raises(UserError, match="two documents have this name"):
        retriever.index([("fish", "A pike."), ("fish", "A trout.")])
    assert retriever.blocks == before


def test_added_replaced_and_deleted_documents_are_those_of_a_new_index(model):
    changed = Retriever(model, TOKENIZER)
    changed.index(TEXTS)
    changed.add({"fish": "A pike waits in the reeds of the lake. "})
    changed.replace({"ships": "A galley with forty oars. "})
    changed.delete("birds")
    assert changed.names == ["short", "fish", "ships"]
    new = Retriever(model, TOKENIZER)
    expected = {"short": TEXTS["short"], "fish": "A pike waits in the reeds of the lake. "}
    new.index(expected | {"ships": "A galley with forty oars. "})
    assert new.blocks == changed.blocks
    torch.testing.assert_close(changed.scores("oars"), new.scores("oars"))
    changed.delete(*changed.names)
    assert len(changed) == 0
    with pytest.raises(UserError, match="index is empty"):
        changed.query("oars")


@pytest.mark.parametrize("scorer", ["landmark", "tokens"])
def test_an_index_comes_back_from_disk(model, tmp_path, scorer):
    retriever = Retriever(model, TOKENIZER, scorer=scorer)
    retriever.index(TEXTS | {"lines": "one\u2028two\x85three\nfour"})
    retriever.save(tmp_path / "index")
    again = Retriever(model, TOKENIZER, scorer=scorer)
    again.load(tmp_path / "index")
    assert again.blocks == retriever.blocks
    assert torch.equal(again.scores("heron"), retriever.scores("heron"))
    again.delete("birds")
    again.save(tmp_path / "index")
    retriever.load(tmp_path / "index")
    assert "birds" not in retriever.names


def test_any_flipped_bit_of_an_index_is_noticed(model, tmp_path):
    """But one in the name of its hash, without which it is one of an early version: it is as it was."""
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    retriever.save(tmp_path / "index")
    (tmp_path / "copies").mkdir()
    found, noticed = retriever.scores("heron"), 0
    for path in flipped(tmp_path / "index", tmp_path / "copies", count=24):
        try:
            retriever.load(path)
        except UserError:
            noticed += 1
    assert torch.equal(retriever.scores("heron"), found)
    assert noticed >= 20


def test_an_index_that_does_not_fit_is_refused(model, tmp_path):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    retriever.save(tmp_path / "index")
    found = retriever.scores("heron")
    (tmp_path / "damaged").write_bytes((tmp_path / "index").read_bytes()[:-9])
    for name in ("nothing", "damaged"):
        with pytest.raises(UserError, match=f"{name}: no index, or a damaged one"):
            retriever.load(tmp_path / name)
    assert torch.equal(retriever.scores("heron"), found)
    with pytest.raises(UserError, match=r"another scorer \(landmark, here tokens\)"):
        Retriever(model, TOKENIZER, scorer="tokens").load(tmp_path / "index")
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(UserError, match="another model"):
        Retriever(model, TOKENIZER).load(tmp_path / "index")


def test_spans_are_of_the_documents_own_characters_where_the_tokenizer_changes_them():
    """It lowers letters, takes accents off and puts a space in front, as tokenizers of real models do."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from landmark.data.pretrained_tokenizer import PretrainedTokenizer

    letters = {letter: number for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz.,'?")}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
    inner.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PretrainedTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eot>"))
    text = "Élan vital, Ça va. Übung 'macht' den Meister."
    blocks, ids = split_into_blocks("text", text, tokenizer, 6)
    assert "".join(block.text for block in blocks) == text
    assert [block.text for block in blocks[:2]] == ["Élan ", "vital,"]
    assert all(text[block.start : block.stop] == block.text for block in blocks)
    assert len(ids) == 6 * len(blocks)


def test_a_count_of_more_than_there_is_is_refused(model):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    assert len(retriever.query("heron")) == 10
    assert len(retriever.documents("heron")) == 3
    for count in (0, len(retriever) + 1, 2.0):
        with pytest.raises(UserError, match=f"count={count}: must be from 1 to {len(retriever)}, the number of blocks"):
            retriever.query("heron", count)
    with pytest.raises(UserError, match="from 1 to 3, the number of documents"):
        retriever.documents("heron", 4)


def test_invalid_documents_texts_heads_and_models_are_refused(model):
    retriever = Retriever(model, TOKENIZER)
    with pytest.raises(UserError, match="index is empty"):
        retriever.query("anything")
    with pytest.raises(UserError, match=r"blank: the document has no text"):
        retriever.index({"blank": ""})
    retriever.index(TEXTS)
    with pytest.raises(UserError, match="text is empty"):
        retriever.query("")
    with pytest.raises(UserError, match="scorer=words: must be one of landmark, mean_key, tokens"):
        Retriever(model, TOKENIZER, scorer="words")
    retriever.heads = [(0, 1), (7, 0)]
    with pytest.raises(UserError, match=r"heads=\[\(7, 0\)\]"):
        retriever.query("anything")
    with pytest.raises(UserError, match="no landmarks to retrieve by"):
        Retriever(Decoder(decoder_config("transformer", 320, 1, 2, 8, 32)), TOKENIZER)


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_spans_count_characters_and_cut_none(model, block_size):
    """Tokens are bytes here: a block may end within a character, which then belongs to the last of its blocks."""
    text = "Zwölf Reiher — 十二只苍鹭 🪶🪶, naïve."
    blocks, _ = split_into_blocks("text", text, TOKENIZER, block_size)
    assert len(blocks) == -(-len(text.encode()) // block_size)
    assert "".join(block.text for block in blocks) == text
    assert all(text[block.start : block.stop] == block.text for block in blocks)
    bytes_before = 0
    for number, block in enumerate(blocks[:-1], 1):
        bytes_before += len(block.text.encode())
        assert 0 <= number * block_size - bytes_before < 4
    retriever = Retriever(model, TOKENIZER)
    retriever.index({"text": text})
    assert all("\ufffd" not in block.text for block in retriever.query("Reiher"))


def test_scores_have_no_graph(model):
    """It would keep the queries and keys of all layers, and refuse numpy."""
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    with torch.enable_grad():
        assert not retriever.scores("heron").requires_grad
        assert retriever.scores("heron").numpy().shape == (len(retriever),)


def test_what_is_no_text_name_or_count_is_refused(model):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    for text in (None, 5, b"heron", ["heron"]):
        for ask in (retriever.query, retriever.scores, retriever.documents, retriever.head_scores):
            with pytest.raises(UserError, match="text: must be a text, not"):
                ask(text)
    with pytest.raises(UserError, match="text: has half a character"):
        retriever.query("her\ud800n")
    with pytest.raises(UserError, match="half: has half a character"):
        retriever.add({"half": "her\ud800n"})
    with pytest.raises(UserError, match="count=True"):
        retriever.query("heron", True)
    for documents in ("text", ["text"], [("a", "b", "c")], {1: "text"}, None):
        for change in (retriever.add, retriever.replace):
            with pytest.raises(UserError, match="is no pair of a name and a text"):
                change(documents)
    with pytest.raises(UserError, match="pike: must be a text, not int"):
        retriever.add({"pike": 5})
    with pytest.raises(UserError, match="no document of this name"):
        retriever.delete(["birds"])


def test_an_index_of_another_embedding_of_the_landmark_is_refused(model, tmp_path):
    retriever = Retriever(model, TOKENIZER)
    retriever.index(TEXTS)
    retriever.save(tmp_path / "index")
    with torch.no_grad():
        model.embedding.weight[257] += 1
    with pytest.raises(UserError, match="another model"):
        retriever.load(tmp_path / "index")
