import gzip
import itertools
import json
import logging
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from landmark.data import SPLITS, Tokenizer, find, prepare
from landmark.data.arxiv_math import HUB_FILES, HUB_NAME
from landmark.data.sources import open_source
from landmark.utils.errors import UserError

PAPERS = {
    "train": [
        ("\\section{Öne}\r\n two\u2028 lines", "arxiv"),
        ("A book.", "books"),
        ("\\section{Two}\n", "arxiv"),
        ("theorem", "formal"),
        ("\\section{Three}" + " long" * 5000, "arxiv"),
    ],
    "validation": [("a question", "stack-exchange"), ("\\section{Four}", "arxiv")],
    "test": [("\\section{Five}", "arxiv"), ("another book", "books")],
}


def write(file: Path, *lines: object) -> None:
    """A file of JSON lines, compressed where its name says so; a string is a line as it stands."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    content = text.encode("utf-8", "surrogateescape")
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def line(text: object, config: str = "arxiv") -> dict[str, object]:
    return {"text": text, "meta": json.dumps({"config": config, "file": "main.tex"})}


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder with one file a split, its meta JSON-encoded as proof-pile's loader gave it out."""
    for split, documents in PAPERS.items():
        write(tmp_path / "papers" / f"{split}.jsonl", *itertools.starmap(line, documents))
    return tmp_path / "papers"


@pytest.fixture
def pile(tmp_path: Path) -> Path:
    """The same lines as proof-pile's files have them: gzipped, meta an object whose keys and types change.

    Of the 21 files of the train split, the first five hold one document each, the others a line without a config.
    """
    metas = [{"file": "1.tex"}, {"score": 4}, {"score": "four", "tags": ["a"]}, {}, {"tags": {"a": None}}]
    rest = {"text": "no config", "meta": {"problem": 3}}
    for split, documents in PAPERS.items():
        lines = [{"text": text, "meta": {**meta, "config": config}} for (text, config), meta in zip(documents, metas)]
        files = HUB_FILES[split]
        for number, file in enumerate(files):
            write(tmp_path / "pile" / file, *(lines if len(files) == 1 else lines[number : number + 1] or [rest]))
    return tmp_path / "pile"


@pytest.fixture
def hub(pile: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hub, served from disk through the builder that was asked for; the files in the order they were asked for."""
    import datasets

    load, asked = datasets.load_dataset, []

    def from_disk(builder: str, data_files: str, **settings):
        asked.append(data_files)
        assert builder == "json"
        prefix = f"hf://datasets/{HUB_NAME}/"
        assert data_files.startswith(prefix)
        return load(builder, data_files=str(pile / data_files.removeprefix(prefix)), **settings)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    return asked


def texts(root: Path | None, split: str = "train", **options) -> list[str]:
    return [document.text for document in open_source("arxiv_math", root, **options).documents(split)]


def of(split: str, *configs: str) -> list[str]:
    return [text for text, config in PAPERS[split] if config in configs or not configs]


def test_papers_come_whole_in_the_order_of_the_file(papers: Path):
    for split in SPLITS:
        assert texts(papers, split) == of(split, "arxiv")
    documents = list(open_source("arxiv_math", papers).documents("train"))
    assert [document.name for document in documents] == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:5"]


def test_configs_are_a_choice(papers: Path):
    assert texts(papers, configs=["formal", "books"]) == of("train", "books", "formal")
    assert texts(papers, configs=None) == of("train")


def test_files_may_be_compressed(papers: Path):
    for split in SPLITS:
        file = papers / f"{split}.jsonl"
        file.with_name(f"{split}.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert texts(papers, "test", configs=None) == of("test")


def test_proof_piles_own_layout_is_the_same_documents(papers: Path, pile: Path):
    for split in SPLITS:
        assert texts(pile, split) == texts(papers, split)
    names = [document.name for document in open_source("arxiv_math", pile).documents("train")]
    assert names == [f"train/proofpile_train_{number}.jsonl.gz:1" for number in (0, 2, 4)]
    assert texts(pile, configs=["none"]) == ["no config"] * 16


def test_numbered_files_are_in_the_order_of_their_numbers(tmp_path: Path, papers: Path):
    (papers / "train.jsonl").unlink()
    for number in range(12):
        write(papers / "train" / f"proofpile_train_{number}.jsonl", line(f"paper {number}"))
    assert texts(papers) == [f"paper {number}" for number in range(12)]


def test_the_hub_is_read_with_the_json_builder(pile: Path, hub: list[str]):
    remote, local = (open_source("arxiv_math", root) for root in (None, pile))
    assert hub == []
    for split in SPLITS:
        assert list(remote.documents(split)) == list(local.documents(split))
        assert remote.report(split) == local.report(split)
    assert hub == [f"hf://datasets/{HUB_NAME}/{file}" for split in SPLITS for file in HUB_FILES[split]]
    assert remote.report("train")["configs"] == {"none": 16, "arxiv": 3, "books": 1, "formal": 1}


def test_a_bad_line_of_the_hub_is_named(pile: Path, hub: list[str]):
    write(pile / "dev" / "proofpile_dev.jsonl.gz", line("good"), {"text": None}, line("good"), '{"text": ')
    with pytest.raises(UserError, match=r"dev/proofpile_dev\.jsonl\.gz, line 2: no JSON object with a \"text\""):
        texts(None, "validation")
    with pytest.raises(UserError, match=r"proofpile_dev\.jsonl\.gz could not be read from line 4 on .*data\.path to"):
        texts(None, "validation", bad_lines="skip")


def test_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    import datasets

    def unreachable(*arguments, **settings):
        raise ConnectionError("Couldn't reach the Hub\nTraceback")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"proof-pile: train/.*Couldn't reach the Hub\): try again; or set") as error:
        texts(None)
    assert "\n" not in str(error.value)


def test_configs_without_documents_are_refused_with_those_found(papers: Path):
    with pytest.raises(UserError, match=r"split 'test' .* data\.configs=\[arXiv,wiki\]: found arxiv, books; name some"):
        texts(papers, "test", configs=["wiki", "arXiv"])
    write(papers / "test.jsonl")
    with pytest.raises(UserError, match="found no document at all"):
        texts(papers, "test")


BAD = {
    "cut short": ('{"text": "x", "me', "the line is not JSON"),
    "no text": ({"meta": "{}"}, 'no JSON object with a "text"'),
    "text that is a number": (line(3), 'no JSON object with a "text"'),
    "a list": (["text", "meta"], 'no JSON object with a "text"'),
    "no meta": ({"text": "x"}, 'no "meta" that is a JSON object'),
    "meta that is no JSON": ({"text": "x", "meta": "arxiv"}, "its meta is not JSON"),
    "meta that is no object": ({"text": "x", "meta": "3"}, 'no "meta" that is a JSON object'),
    "half a surrogate pair": (line("\ud800"), "the text holds half a surrogate pair"),
    "not UTF-8": ('{"text": "caf\udce9", "meta": "{}"}', "the line is not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_stops_or_is_left_out_and_counted(papers: Path, case: str, caplog):
    bad, reason = BAD[case]
    write(papers / "train.jsonl", line("one"), "", line("two", "books"), bad, bad, line("three"))
    with pytest.raises(UserError) as error:
        texts(papers)
    assert f"train.jsonl, line 4: {reason}" in str(error.value)
    assert "data.bad_lines=skip" in str(error.value)
    source = open_source("arxiv_math", papers, bad_lines="skip")
    with caplog.at_level(logging.WARNING):
        assert [document.text for document in source.documents("train")] == ["one", "three"]
    assert source.report("train") == {"configs": {"arxiv": 2, "books": 1}, "skipped_lines": 2}
    assert "train.jsonl, line 4" in caplog.text
    assert "lines of split train that were skipped: 2" in caplog.text


def test_the_manifest_counts_configs_and_skipped_lines(papers: Path, byte_tokenizer: Tokenizer, tmp_path: Path):
    write(papers / "test.jsonl", line("x"), "{", line("y", "books"))
    options = {"bad_lines": "skip"}
    corpus = prepare("arxiv_math", byte_tokenizer, tmp_path, path=papers, options=options, progress=False)
    splits = corpus.manifest["splits"]
    assert (splits["test"]["configs"], splits["test"]["skipped_lines"]) == ({"arxiv": 1, "books": 1}, 1)
    assert (splits["train"]["documents"], splits["train"]["configs"]["arxiv"]) == (3, 3)
    assert corpus.manifest["source"]["configs"] == ["arxiv"]


def test_another_choice_is_another_corpus(papers: Path, byte_tokenizer: Tokenizer, tmp_path: Path):
    choices = [{}, {"configs": None}, {"configs": ["arxiv", "books"]}, {"bad_lines": "skip"}]
    for options in choices:
        assert find("arxiv_math", byte_tokenizer, tmp_path, path=papers, options=options) is None
        prepare("arxiv_math", byte_tokenizer, tmp_path, path=papers, options=options, progress=False)
    same = find("arxiv_math", byte_tokenizer, tmp_path, path=papers, options={"configs": ["books", "arxiv", "books"]})
    assert same is not None
    assert same.split("train").documents == 4


def test_one_line_is_in_memory_at_a_time(papers: Path):
    write(papers / "train.jsonl", *[line("x" * 200_000)] * 100, "{")
    tracemalloc.start()
    documents = open_source("arxiv_math", papers).documents("train")
    assert sum(len(document.text) for document in itertools.islice(documents, 100)) == 20_000_000
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    with pytest.raises(UserError, match="line 101"):
        next(documents)


def test_missing_ambiguous_and_damaged_files_are_refused(papers: Path):
    with pytest.raises(UserError, match=r"data\.configs=\[\]: name at least one"):
        open_source("arxiv_math", papers, configs=[])
    with pytest.raises(UserError, match=r"absent is not a folder: give the folder that holds train\.jsonl"):
        open_source("arxiv_math", papers / "absent")
    packed = papers / "train.jsonl.gz"
    packed.write_bytes(gzip.compress(os.urandom(5000))[:-9])
    with pytest.raises(UserError, match=r"split 'train' twice, as train\.jsonl and train\.jsonl\.gz: keep one"):
        open_source("arxiv_math", papers)
    (papers / "train.jsonl").unlink()
    with pytest.raises(UserError, match=r"cannot read .*train\.jsonl\.gz .*: get it again"):
        texts(papers, bad_lines="skip")
    packed.unlink()
    with pytest.raises(UserError, match="holds nothing for split 'train': expected train"):
        open_source("arxiv_math", papers)


def test_real_mathematics_has_the_published_counts(shared: Path, gpt2: Tokenizer, tmp_path: Path):
    root = tmp_path / "math"
    root.mkdir()
    for split, given in (("train", "validation"), ("validation", "validation"), ("test", "test")):
        shutil.copy(shared / "math-mini" / f"{given}.jsonl", root / f"{split}.jsonl")
    with pytest.raises(UserError, match=r"data\.configs=\[arxiv\]: found ctfp, hott-book, .*, symmetry-book; name"):
        prepare("arxiv_math", gpt2, tmp_path / "cache", path=root, progress=False)
    options = {"configs": None}
    corpus = prepare("arxiv_math", gpt2, tmp_path / "cache", path=root, options=options, progress=False)
    streams = [corpus.split(split) for split in ("validation", "test")]
    counts = [(stream.documents, stream.num_bytes, len(stream) - stream.documents) for stream in streams]
    assert counts == [(29, 1_493_814, 595_922), (25, 1_536_745, 582_560)]
