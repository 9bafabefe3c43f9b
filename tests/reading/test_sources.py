"""The passages behind an answer: word for word from the text, with their places, and shares as the model's own."""

import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from tokenizers.normalizers import NFC

from benchmarks.sources import rank
from landmark.documents import Document, beside_memory, concatenated, documents_read, saved_document
from landmark.documents.document import FILE
from landmark.documents.patches import Places, differences, file_text
from landmark.memory.blocks.shares import AttentionProbe
from landmark.models.huggingface import wrap
from landmark.reading.answering import Answering, finished
from landmark.reading.sources import find, passages, text_of
from tests.models.huggingface.conftest import make_model, make_tokenizer

LINES = [f"Bird {number} of {number * 7} waits there. " for number in range(40)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "qwen2"])
@torch.no_grad()
def test_shares_are_those_of_the_original_models_attention(family):
    """Of the layers with full attention, in whatever pieces the text is read."""
    original, ids = make_model(family, "eager"), torch.arange(60)[None] * 7 % 256
    expected = original(ids, output_attentions=True).attentions
    model = wrap(make_model(family, "eager"), make_tokenizer(), block_size=8, landmarks="none")
    cache = model.new_memory()
    cache.memory = watched = AttentionProbe(cache.memory, 5, range(43, 57))
    for part in ids.split((20, 26, 1, 13), 1):
        model(part, past_key_values=cache)
    weights = torch.stack([expected[layer] for layer in sorted(cache.landmark_layers)])[:, 0, :, 43:57, :40]
    torch.testing.assert_close(watched.shares(), weights.unflatten(-1, (5, 8)).sum(-1).mean(2), rtol=1e-3, atol=1e-5)


def test_blocks_beyond_the_models_positions_are_weighed_alike():
    """The first layer of a text that says one thing again and again gives as much to each of its blocks."""
    model = wrap(make_model("llama"), make_tokenizer(), block_size=8, landmarks="none")
    ids, spreads = torch.arange(8).repeat(12)[None] * 5, []
    for mapping in ("true", "stingy"):
        cache = model.new_memory(k=2, window=8, dense=0, mapping=mapping)
        cache.memory = watched = AttentionProbe(cache.memory, 9, range(80, 90))
        model(ids, past_key_values=cache)
        shares = watched.shares()[0]
        spreads.append(float((shares.amax(1) / shares.amin(1)).max()))
    assert spreads[0] > 1.01
    assert spreads[1] == pytest.approx(1, abs=1e-4)


def test_the_rank_of_a_passage_is_that_of_its_best_block_and_a_mean_where_blocks_are_equal():
    assert [rank(np.array([9, 4, 1, 4, 0]), gold) for gold in ([1, 2], [2], [4], [0, 4])] == [1.5, 3, 4, 4]


@settings(max_examples=60, deadline=None)
@given(st.text("ab. \n", max_size=300), st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_passages_are_apart_and_hold_the_best_block(text, score, most):
    bounds = [len(text) * at // len(score) for at in range(len(score) + 1)]
    found = passages(text, bounds, np.array(score, float), most)
    assert len(found) <= most
    assert bool(found) == any(score)
    assert sum(share for _, _, share in found) <= 1 + 1e-9
    spans = sorted((start, end) for start, end, _ in found)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_passage_is_whole_sentences_with_neighbours_that_have_as_much():
    text = "Once there was a lake. Henrik had painted the house by Mr. J. Brown, in May! It was red. Nobody saw it."
    bounds = [*range(0, len(text), 12), len(text)]
    score = np.zeros(len(bounds) - 1)
    score[3], score[4], score[7] = 1, 0.6, 0.1
    (start, end, share), (other, *_) = passages(text, bounds, score, 2)
    assert text[start:end].strip() == "Henrik had painted the house by Mr. J. Brown, in May!"
    assert share == pytest.approx(1.6 / 1.7)
    assert text[other:].startswith("Nobody saw it.")


def test_a_text_in_blocks_is_the_text():
    """Also where a block ends in the middle of a letter."""
    text = "Größe: 5 €. 鳥が水の中に立って待っている。" * 3
    tokenizer = make_tokenizer()
    found, bounds = text_of(tokenizer.decode, tokenizer(text)["input_ids"], 5)
    assert found == text
    assert len(bounds) == len(text.encode()) // 5 + 1
    assert bounds == sorted(bounds)
    assert all(0 <= 5 * number - len(text[:at].encode()) < 10 for number, at in enumerate(bounds))


def test_files_that_were_joined_are_found_again(tmp_path):
    one = Document("a.pdf", "First.\n\nSecond.\n\n", ((0, "page 1"), (8, "page 3")))
    two = Document("b.txt", "Alpha.\nBeta.\n")
    whole = concatenated([one, two])
    found = whole.parts()
    assert [document for _, document in found] == [each._replace(text=each.text.rstrip()) for each in (one, two)]
    assert all(whole.text.startswith(document.text, start) for start, document in found)
    assert one.parts() == [(0, one)]
    read = documents_read("".join, f"Before. {two.text}", two, [tmp_path], before=8)
    assert read == [(0, Document("", "Before. ")), (8, two)]
    folders, ids = [tmp_path / name for name in ("a", "b")], "One. \nTwo."  # the tokenizer puts a space between them
    found = documents_read(lambda ids: "".join(ids).lstrip(" "), f"One.  {ids}", None, folders, (0, 5))
    assert found == [(0, Document("a", "One. ")), (6, Document("b", ids))]


def read_and_found(model, documents, question, most, alone=False, tokenizer=None):
    """What is found in a memory of documents that has answered a question, and the memory's answering."""
    answering = Answering(model, tokenizer or make_tokenizer())
    whole = concatenated(documents)
    before = answering.ids(whole.text)
    document = whole.as_read(answering.chats.decode(before))
    ids, null = (answering.ids(each, False) for each in (question, "N/A"))
    with answering.prefixes.using([*before, *ids]) as cache:
        finished(answering.read(torch.tensor([[*before, *ids]]), cache))
        kept = cache.memory.layers[1].keys.clone()
        found = find(answering, cache, document.parts(), before, ids, null, most, alone)
        assert torch.equal(cache.memory.layers[1].keys, kept)
    return found


def reader(family="llama"):
    return wrap(make_model(family), make_tokenizer(), block_size=16, landmarks="none", memory={"k": 4, "window": 16})


@pytest.mark.parametrize(("family", "line"), [("llama", 23), ("gemma3", 23), ("llama", 0), ("gemma3", 0)])
def test_the_passage_that_alone_has_the_questions_words_comes_first(family, line):
    """Also where a text begins with it. Its characters are the document's; the memory goes on as before."""
    lines = LINES.copy()
    lines[line] = "The zebra sleeps in Quito. "
    model, text = reader(family), "".join(lines)
    document = Document("birds.txt", text, ((0, "page 1"), (text.index("The zebra"), "page 2")))
    found = read_and_found(model, [document], "Where sleeps the zebra?", 3).sources
    assert found[0].text == "The zebra sleeps in Quito."
    assert (found[0].place, found[0].document) == ("page 2", "birds.txt")
    assert all(text[each.start : each.end] == each.text for each in found)
    assert 0 < sum(each.share for each in found) <= 1
    shares = [each.share for each in read_and_found(model, [document], "Where sleeps the zebra?", 12).sources]
    assert len(shares) > 6
    assert shares == sorted(shares, reverse=True)
    assert read_and_found(model, [document], "N/A", 3).sources == []


def test_an_answer_from_passages_has_the_heads_of_their_documents_in_the_order_of_the_request():
    names = "z.txt", "a.txt"
    lines = [f"This is the file {name}, by Osgood. {''.join(LINES)}The zebra of {name} sleeps. " for name in names]
    documents = [Document(name, text) for name, text in zip(names, lines, strict=True)]
    found = read_and_found(reader(), documents, "Where sleeps the zebra?", 4, alone=True)
    beginnings = {each.document for each in found.sources if each.text.startswith("This is the file")}
    assert beginnings == {*names}
    assert {each.kind for each in found.sources} == {"passage", "head"}
    ordered = sorted(found.sources, key=lambda each: found.text.index(f"{each.text}\n\n"))
    places = [(names.index(each.document), each.start) for each in ordered]
    assert places == sorted(places)


def test_a_text_without_a_passage_is_the_passage():
    short = Document("a.txt", "The landlord is Osgood.")
    found = read_and_found(reader(), [short], "N/A", 3, alone=True)
    assert found.text == ""
    assert [(each.kind, each.text, each.end) for each in found.sources] == [("whole", short.text, len(short.text))]
    long = Document("a.txt", short.text * 400)
    assert [(each.text, each.end) for each in read_and_found(reader(), [long], "N/A", 3, alone=True).sources] == [
        ("", len(long.text))
    ]


def test_places_are_the_files_also_where_a_tokenizer_composes_accents(tmp_path):
    """As Qwen's does. Of a saved memory, too, and of the second of two files."""
    tokenizer, lines = make_tokenizer(), [f"Le héron nº {number} a été là. " for number in range(40)]
    tokenizer.backend_tokenizer.normalizer = NFC()
    lines[23] = "Le zèbre dort à Quito. "
    text = unicodedata.normalize("NFD", "".join(lines))
    documents = [Document(name, text, ((0, "page 1"), (text.index("Le ze"), "page 2"))) for name in ("a.txt", "b.txt")]
    for files in (documents[:1], documents):
        found = read_and_found(reader(), files, unicodedata.normalize("NFD", "Où dort le zèbre ?"), 4, False, tokenizer)
        assert found.sources
        for each in found.sources:
            assert text[each.start : each.end] == each.text
            assert each.place == ("page 2" if each.start >= text.index("Le ze") else "page 1")
        assert "Le zèbre dort à Quito." in {unicodedata.normalize("NFC", each.text) for each in found.sources}
        read = unicodedata.normalize("NFC", concatenated(files).text)
        document = concatenated(files).as_read(read)
        (tmp_path / FILE).write_bytes(beside_memory(document, None)[FILE])
        assert saved_document(tmp_path, f"{read} and a chat") == document


@settings(max_examples=100, deadline=None)
@given(st.text("aeoﬁx \n한Å" + "éñộ" + "\u0301\u0323\u0308", max_size=80), st.sampled_from(["NFC", "NFKC", "NFD"]))
def test_patches_make_the_file_of_the_tokens_text(text, form):
    read = unicodedata.normalize(form, text)
    patches = differences(text, read)
    places = Places(patches)
    assert file_text(read, patches) == text
    for at in range(len(read) + 1):
        assert unicodedata.normalize(form, text[: places.in_file(at)]) == read[: places.in_read(places.in_file(at))]
