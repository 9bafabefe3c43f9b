"""A folder of one's own documents."""

import gzip
import json

import pytest

from landmark.data import prepare
from landmark.data.sources import SPLITS, open_source
from landmark.data.tokenizers import load_tokenizer
from landmark.utils.errors import UserError


def lines(texts):
    return "".join(json.dumps({"text": text, "meta": {"source": "made up"}}) + "\n" for text in texts)


def read(root, split):
    return [document.text for document in open_source("documents", root).documents(split)]


def test_json_lines_as_redpajamas_and_text_files_make_splits(tmp_path):
    texts = [f"document {number}" for number in range(120)]
    (tmp_path / "a.jsonl").write_text(lines(texts[:70]) + "\n")
    (tmp_path / "b.txt").write_text(texts[70])
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(lines(texts[71:]))
    found = {split: read(tmp_path, split) for split in SPLITS}
    assert found["validation"] == [texts[0], texts[50], texts[100]]
    assert found["test"] == [texts[1], texts[51], texts[101]]
    assert found["train"] == [text for n, text in enumerate(texts) if n % 50 > 1]


def test_few_documents_are_split_too(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    assert [read(tmp_path, split) for split in SPLITS] == [["text 2", "text 3"], ["text 0"], ["text 1"]]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_book_is_split_by_length(tmp_path, caplog, count, is_file):
    texts = [" ".join(f"word{number}" for number in range(start, start + 1000)) for start in (0, 5000)[:count]]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "all.jsonl").write_text(lines(texts))
    path = tmp_path / "mine" / "all.jsonl" if is_file else tmp_path / "mine"
    with caplog.at_level("INFO"):
        corpus = prepare("documents", load_tokenizer("bytes"), tmp_path / "cache", path=path, progress=False)
    assert f"has {count} document(s): 90 % of the text is train, then 5 % each" in caplog.text
    parts = {split: read(path, split) for split in SPLITS}
    assert ["".join(each) for each in zip(*(parts[split] for split in SPLITS))] == texts
    assert all(part.split()[-1] in text.split() for part, text in zip(parts["train"], texts))  # no word is cut
    sizes = [corpus.manifest["splits"][split]["tokens"] for split in SPLITS]
    assert [round(size / sum(sizes), 2) for size in sizes] == [0.9, 0.05, 0.05]


def test_splits_that_are_there_are_kept(tmp_path):
    for split in SPLITS:
        (tmp_path / split).mkdir()
        (tmp_path / split / "some.jsonl").write_text(lines([f"{split} {n}" for n in range(2)]))
    for split in SPLITS:
        assert read(tmp_path, split) == [f"{split} 0", f"{split} 1"]


def test_becomes_a_corpus(tmp_path):
    root = tmp_path / "mine"
    root.mkdir()
    (root / "all.jsonl").write_text(lines([f"document {number}" for number in range(10)]))
    corpus = prepare("documents", load_tokenizer("bytes"), tmp_path / "cache", path=root, progress=False)
    assert corpus.split("train").documents == 8
    (root / "all.jsonl").write_text(lines([f"document {number}" for number in range(11)]))
    again = prepare("documents", load_tokenizer("bytes"), tmp_path / "cache", path=root, progress=False)
    assert again.folder != corpus.folder


@pytest.mark.parametrize("line", ["{", '{"meta": 1}', '{"text": 5}', "[]"])
def test_an_invalid_line_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(lines(["x"] * 60) + line + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 61"):
        read(tmp_path, "train")


def test_folders_without_documents_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.path=null"):
        open_source("documents")
    with pytest.raises(UserError, match="is not a folder"):
        open_source("documents", tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no document"):
        open_source("documents", tmp_path)
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text("text")
    with pytest.raises(UserError, match="expected train, validation, test"):
        open_source("documents", tmp_path)
    (tmp_path / "one.txt").unlink()
    (tmp_path / "train" / "b.jsonl.gz").write_bytes(b"no gzip")
    for split in ("validation", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text("text")
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path, "train")
