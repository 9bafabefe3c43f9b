"""Corpora before they are prepared: PG-19, arXiv Math, one's own documents, the standard library."""

import gzip
import itertools
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from landmark.documents import Document, read_document
from landmark.experiment.data import SPLITS, Tokenizer, find, prepare
from landmark.experiment.data import documents as own_documents
from landmark.experiment.data.arxiv_math import HUB_FILES, HUB_NAME
from landmark.experiment.data.sources import open_source
from landmark.experiment.data.stdlib import split_of
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


def write_parquet(file: Path, rows: dict[int, str | None], **columns: list) -> None:
    """A file of the parquet mirror: one book a row, its number at the end of the url."""
    file.parent.mkdir(parents=True, exist_ok=True)
    urls = [f"http://www.gutenberg.org/ebooks/{number}" for number in rows]
    table = {"publication_date": [1900] * len(rows), "url": urls, "text": list(rows.values())}
    pyarrow.parquet.write_table(pyarrow.table({**table, **columns}), file)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """The books of the `books` fixture in the parquet mirror's layout, the train split in two files."""
    root = tmp_path / "mirror" / "data"
    write_parquet(root / "train-00000-of-00002.parquet", {10: "ten\r\nmen  naïve\u00a0tea", 9: "nine lives\n"})
    write_parquet(root / "train-00001-of-00002.parquet", {2: "two 二\n"})
    write_parquet(root / "validation-00000-of-00001.parquet", {5: "five"})
    write_parquet(root / "test-00000-of-00001.parquet", {7: "seven\u3000seas"})
    return root.parent


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder with one file a split, its meta JSON-encoded as proof-pile's loader gave it out."""
    for split, documents in PAPERS.items():
        write(tmp_path / "papers" / f"{split}.jsonl", *itertools.starmap(line, documents))
    return tmp_path / "papers"


@pytest.fixture
def pile(tmp_path: Path) -> Path:
    """The same lines in proof-pile's own files: the first of the train split hold one each, the others a line without a
    config."""
    metas = [{"file": "1.tex"}, {"score": 4}, {"score": "four", "tags": ["a"]}, {}, {"tags": {"a": None}}]
    rest = {"text": "no config", "meta": {"problem": 3}}
    for split, documents in PAPERS.items():
        lines = [{"text": text, "meta": {**meta, "config": config}} for (text, config), meta in zip(documents, metas)]
        files = HUB_FILES[split]
        for number, file in enumerate(files):
            write(tmp_path / "pile" / file, *(lines if len(files) == 1 else lines[number : number + 1] or [rest]))
    return tmp_path / "pile"


@pytest.fixture
def hub(request, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hub, served from disk; what was asked for, in this order."""
    import datasets
    import fsspec.core

    load, opened, asked = datasets.load_dataset, fsspec.core.url_to_fs, []

    def from_disk(name: str):
        asked.append(name)
        mirror = request.getfixturevalue("mirror")
        files = {split: [str(file) for file in mirror.rglob(f"{split}-*.parquet")] for split in SPLITS}
        return load("parquet", data_files=files)

    def system_of(place: str):
        if "://" not in place:
            return opened(place)
        asked.append(place)
        prefix = f"hf://datasets/{HUB_NAME}/"
        assert place.startswith(prefix)
        return opened(str(request.getfixturevalue("pile") / place.removeprefix(prefix)))

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    monkeypatch.setattr(fsspec.core, "url_to_fs", system_of)
    return asked


def texts(name: str, root: Path | None, split: str = "train", **options) -> list[str]:
    return [document.text for document in open_source(name, root, **options).documents(split)]


def papers_of(split: str, *configs: str) -> list[str]:
    return [text for text, config in PAPERS[split] if config in configs or not configs]


def test_books_come_in_the_order_of_their_numbers_from_a_folder_and_from_the_hub(books, hub, mirror):
    raw, of_hub = open_source("pg19", books), open_source("pg19")
    assert hub == []
    assert [document.name for document in raw.documents("train")] == ["2", "9", "10"]
    assert texts("pg19", books) == ["two 二\n", "nine lives\n", "ten\r\nmen  naïve\u00a0tea"]
    for split in SPLITS:
        assert list(of_hub.documents(split)) == list(raw.documents(split))
    assert hub == ["emozilla/pg19"]
    write_parquet(mirror / "data" / "test-00000-of-00001.parquet", {7: "x"}, url=["http://example.org/"])
    with pytest.raises(UserError, match=r"split 'test' of emozilla/pg19: the url of row 0 ends in no number"):
        texts("pg19", None, "test")


def test_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    import datasets
    import fsspec.core

    def unreachable(*arguments, **settings):
        raise ConnectionError("Couldn't reach the Hub\nTraceback")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(fsspec.core, "url_to_fs", unreachable)
    for name, said in (("pg19", "could not be loaded"), ("arxiv_math", "cannot read hf://datasets/.*gz from line 1")):
        with pytest.raises(UserError, match=rf"{said}.* .*Couldn't reach the Hub.*\): .*set data\.path") as error:
            texts(name, None)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["pg19", "documents"])
def test_identity_changes_with_the_files_and_not_with_the_place(books: Path, name: str):
    identity = open_source(name, books).identity
    moved = books.rename(books.with_name("moved"))
    assert open_source(name, moved).identity == identity
    file = moved / "test" / "7.txt"
    status = file.stat()
    file.write_bytes(file.read_bytes() + b"!")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    grown = open_source(name, moved).identity
    file.write_bytes(b"?" * (status.st_size + 1))
    assert len({str(value) for value in (identity, grown, open_source(name, moved).identity)}) == 3


def test_papers_come_whole_in_the_order_of_files_and_lines_and_configs_are_a_choice(papers: Path):
    for split in SPLITS:
        assert texts("arxiv_math", papers, split) == papers_of(split, "arxiv")
    names = [document.name for document in open_source("arxiv_math", papers).documents("train")]
    assert names == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:5"]
    assert texts("arxiv_math", papers, configs=["formal", "books"]) == papers_of("train", "books", "formal")
    assert texts("arxiv_math", papers, configs=None) == papers_of("train")
    (papers / "train.jsonl").unlink()
    for number in range(12):
        write(papers / "train" / f"proofpile_train_{number}.jsonl", line(f"paper {number}"))
    assert texts("arxiv_math", papers) == [f"paper {number}" for number in range(12)]


def test_papers_may_be_compressed_or_in_proof_piles_own_layout_on_disk_or_on_the_hub(papers, pile, hub):
    remote, local = (open_source("arxiv_math", root) for root in (None, pile))
    assert hub == []
    for split in SPLITS:
        assert list(remote.documents(split)) == list(local.documents(split))
        file = papers / f"{split}.jsonl"
        file.with_name(f"{split}.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
        assert texts("arxiv_math", pile, split) == texts("arxiv_math", papers, split) == papers_of(split, "arxiv")
    assert hub == [f"hf://datasets/{HUB_NAME}/{file}" for split in SPLITS for file in HUB_FILES[split]]
    names = [document.name for document in local.documents("train")]
    assert names == [f"train/proofpile_train_{number}.jsonl.gz:1" for number in (0, 2, 4)]
    assert texts("arxiv_math", pile, configs=["none"]) == ["no config"] * 16


NO_TEXT, NO_META = "line 4: no JSON object with a .text.", 'train.jsonl:4: no "meta" that is a JSON object'
BAD = {
    "cut short": ('{"text": "x", "me', NO_TEXT),
    "text that is a number": (line(3), NO_TEXT),
    "no meta": ({"text": "x"}, NO_META),
    "meta that is no JSON": ({"text": "x", "meta": "arxiv"}, NO_META),
    "half a surrogate pair": (line("\ud800"), NO_TEXT),
    "not UTF-8": ('{"text": "caf\udce9", "meta": "{}"}', NO_TEXT),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named(papers: Path, case: str):
    bad, reason = BAD[case]
    write(papers / "train.jsonl", line("one"), "", line("two", "books"), bad, line("three"))
    with pytest.raises(UserError, match=f"{reason}.*mend or delete the line"):
        texts("arxiv_math", papers)


def test_another_choice_is_another_corpus(papers: Path, byte_tokenizer: Tokenizer, tmp_path: Path):
    choices = [{}, {"configs": None}, {"configs": ["arxiv", "books"]}]
    for options in choices:
        assert find("arxiv_math", byte_tokenizer, tmp_path, path=papers, options=options) is None
        prepare("arxiv_math", byte_tokenizer, tmp_path, path=papers, options=options, progress=False)
    same = find("arxiv_math", byte_tokenizer, tmp_path, path=papers, options={"configs": ["books", "arxiv", "books"]})
    assert same.manifest["splits"]["train"]["documents"] == 4
    assert same.manifest["source"]["configs"] == ["arxiv", "books"]


def test_one_line_is_in_memory_at_a_time(papers: Path):
    write(papers / "train.jsonl", *[line("x" * 200_000)] * 100, "{")
    tracemalloc.start()
    documents = open_source("arxiv_math", papers).documents("train")
    assert sum(len(document.text) for document in itertools.islice(documents, 100)) == 20_000_000
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    with pytest.raises(UserError, match="line 101"):
        next(documents)


def test_real_mathematics_has_the_published_counts(shared: Path, gpt2: Tokenizer, tmp_path: Path):
    root = tmp_path / "math"
    root.mkdir()
    for split, given in (("train", "validation"), ("validation", "validation"), ("test", "test")):
        shutil.copy(shared / "math-mini" / f"{given}.jsonl", root / f"{split}.jsonl")
    with pytest.raises(UserError, match=r"data\.configs=\[arxiv\]: found ctfp, hott-book, .*, symmetry-book; name"):
        prepare("arxiv_math", gpt2, tmp_path / "cache", path=root, progress=False)
    options = {"configs": None}
    corpus = prepare("arxiv_math", gpt2, tmp_path / "cache", path=root, options=options, progress=False)
    counts = [corpus.manifest["splits"][split] for split in ("validation", "test")]
    found = [(each["documents"], each["bytes"], each["tokens"] - each["documents"]) for each in counts]
    assert found == [(29, 1_493_814, 595_922), (25, 1_536_745, 582_560)]


def test_json_lines_as_redpajamas_and_text_files_make_splits(tmp_path: Path):
    said = [f"document {number}" for number in range(120)]
    write(tmp_path / "a.jsonl", *map(line, said[:70]), "")
    (tmp_path / "b.txt").write_text(said[70])
    write(tmp_path / "c.jsonl.gz", *map(line, said[71:]))
    found = {split: texts("documents", tmp_path, split) for split in SPLITS}
    assert found["validation"] == [said[0], said[50], said[100]]
    assert found["test"] == [said[1], said[51], said[101]]
    assert found["train"] == [text for n, text in enumerate(said) if n % 50 > 1]


def test_splits_that_are_there_are_kept(tmp_path: Path):
    for split in SPLITS:
        write(tmp_path / split / "some.jsonl", *(line(f"{split} {n}") for n in range(2)))
    (tmp_path / "README.md").write_text("About it.")
    source = open_source("documents", tmp_path)
    for split in SPLITS:
        assert [document.text for document in source.documents(split)] == [f"{split} 0", f"{split} 1"]
    assert source.report()[1:] == ["left out, is not in train, validation, test: README.md"]


def words(count: int, start: int = 0) -> str:
    return " ".join(f"word{number}" for number in range(start, start + count))


# Files of a folder, by their numbers of words. Of many documents one may have most of the text.
BY_LENGTH = {
    "a book": {"mine/book.txt": 3000},
    "books and a note": {"a.txt": 9000, "b.TXT": 9000, "c.md": 2200, "note.md": 10},
    "sixty files, one of them large": {f"{number}.txt": 30000 if number == 50 else 100 for number in range(10, 70)},
    "a text without white space": {"a.jsonl": 0},
}


@pytest.mark.parametrize("case", BY_LENGTH)
def test_documents_are_split_by_length_whatever_their_number(tmp_path: Path, byte_tokenizer: Tokenizer, case: str):
    said = {name: words(count) or "一" * 3000 for name, count in BY_LENGTH[case].items()}
    for name, text in said.items():
        write(tmp_path / name, line(text) if name.endswith("l") else text)
    path = tmp_path / next(iter(said)) if len(said) == 1 else tmp_path
    corpus = prepare("documents", byte_tokenizer, tmp_path / "cache", path=path, progress=False)
    parts = {split: texts("documents", path, split) for split in SPLITS}
    assert ["".join(each).rstrip("\n") for each in zip(*(parts[split] for split in SPLITS))] == list(said.values())
    assert all(part.split()[-1] in text.split() for part, text in zip(parts["train"], said.values()) if " " in text)
    sizes = [corpus.manifest["splits"][split]["bytes"] for split in SPLITS]
    assert [round(size / sum(sizes), 2) for size in sizes] == [0.9, 0.05, 0.05]


def test_it_says_what_was_read_and_what_was_left_out(tmp_path: Path, byte_tokenizer: Tokenizer, caplog):
    (tmp_path / "A.TXT").write_text(words(500))
    write(tmp_path / "b.jsonl", line(words(500)), line(""), line("  "))
    others = {"empty.txt": "", "empty.docx": "", "cover.png": "x", "white.md": " \n", ".hidden/c.txt": "x"}
    for name, text in others.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with caplog.at_level("INFO"):
        prepare("documents", byte_tokenizer, tmp_path / "cache", path=tmp_path, progress=False)
    assert [record.getMessage().removeprefix(f"{tmp_path}: ") for record in caplog.records] == [
        "read 2 documents in 2 files (A.TXT, b.jsonl); "
        "each is cut: 90 % to train, then 5 % to validate, and 5 % to test",
        "left out, is of no kind that is read: cover.png",
        "left out, is empty: empty.docx, empty.txt",
        "left out, has no text: white.md",
    ]


def test_a_file_is_converted_once_whatever_the_number_of_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a.html", "b.html"):
        (tmp_path / name).write_text("<p>A heron stands in the water.</p>" * 40)
    (tmp_path / "empty.html").write_text("<p></p>")
    converted = list[str]()

    def counted(path: Path) -> Document:
        converted.append(path.name)
        return read_document(path)

    monkeypatch.setattr(own_documents, "read_document", counted)
    corpus = own_documents.make_source(tmp_path)
    assert [len([*corpus.documents(split)]) for split in ("train", "validation", "test")] == [2, 2, 2]
    assert converted == ["a.html", "b.html", "empty.html"]


def test_standard_library_is_split_by_name_and_source_that_is_not_utf8_left_out(tmp_path: Path):
    source = open_source("stdlib")
    names = {split: [document.name for document in source.documents(split)] for split in SPLITS}
    for split in SPLITS:
        assert names[split] == sorted(names[split])
        assert {split_of(name) for name in names[split]} == {split}
    everything = [name for split in SPLITS for name in names[split]]
    assert "json/decoder.py" in everything
    assert not [name for name in everything if "site-packages" in name or name.startswith("test/")]
    assert 0.8 < len(names["train"]) / len(everything) < 0.97
    for number in range(60):
        (tmp_path / f"module{number}.py").write_text(f"x = {number}\n")
    name = next(open_source("stdlib", tmp_path).documents("train")).name
    (tmp_path / name).write_bytes(b"# caf\xe9\n")
    assert name not in [document.name for document in open_source("stdlib", tmp_path).documents("train")]


PACKED = gzip.compress(os.urandom(5000))
IN_SPLITS = {"train/1.txt": b"x", "validation/2.txt": b"x", "test/3.txt": b"x"}
OF_PAPERS = {f"{split}.jsonl": json.dumps(line("x")).encode() for split in SPLITS}
REFUSED = {  # corpus, its files, options, message
    "no such corpus": (
        "pg20",
        {},
        {},
        r"data\.name=pg20: there is no landmark/experiment/data/pg20\.py that has a make_source",
    ),
    "no folder of books": ("pg19", None, {}, r"absent is not a folder: give the folder that holds train/"),
    "no books": ("pg19", {}, {}, "holds no PG-19 corpus: .*; for texts of your own add data=documents"),
    "no book of a split": ("pg19", {"train/1.txt": b"x"}, {}, r"validation is missing or holds no \.txt file"),
    "no number": ("pg19", IN_SPLITS | {"train/notes.txt": b"x"}, {}, r"notes\.txt is not named <number>\.txt"),
    "Latin-1": (
        "pg19",
        IN_SPLITS | {"train/1.txt": b"caf\xe9"},
        {},
        r"1\.txt is not text in UTF-8 \(byte 3\).*; or take",
    ),
    "no source": ("stdlib", {}, {}, r"no \.py file"),
    "no folder of papers": ("arxiv_math", None, {}, r"absent is not a folder: give the folder that holds train\.jsonl"),
    "no config": ("arxiv_math", OF_PAPERS, {"configs": []}, r"data\.configs=\[\]: name at least one"),
    "other configs": (
        *("arxiv_math", OF_PAPERS | {"train.jsonl": json.dumps(line("x", "books")).encode()}),
        *({"configs": ["wiki", "arXiv"]}, r"split 'train' .* data\.configs=\[arXiv,wiki\]: found books; name some"),
    ),
    "no paper": ("arxiv_math", OF_PAPERS | {"train.jsonl": b""}, {}, "found no document at all"),
    "a split twice": (
        *("arxiv_math", OF_PAPERS | {"train.jsonl.gz": PACKED}, {}),
        r"split 'train' twice, as train\.jsonl and train\.jsonl\.gz: keep one",
    ),
    "a split missing": ("arxiv_math", {"test.jsonl": b""}, {}, "holds nothing for split 'train': expected train"),
    "cut short": (
        *("arxiv_math", {name: x for name, x in OF_PAPERS.items() if "train" not in name}),
        *({}, r"cannot read .*train\.jsonl\.gz .*: get it again"),
    ),
    "no path": ("documents", None, {"root": None}, r"data\.path=null"),
    "no folder of documents": ("documents", None, {}, "is not a folder"),
    "no documents": ("documents", {}, {}, "holds no document"),
    "no text in a split": (
        *("documents", IN_SPLITS | {"train/1.txt": b"", "train/4.md": b" "}, {}),
        "no text to split: train/1.txt is empty, train/4.md has no text",
    ),
    "some splits": ("documents", {"one.txt": b"x", "train/a.txt": b"x"}, {}, "expected train, validation, test"),
    "no gzip": ("documents", IN_SPLITS | {"train/b.jsonl.gz": b"no gzip"}, {}, "cannot read"),
    "no text": ("documents", {"a.jsonl": b'{"text": "x"}\n' * 60 + b'{"text": 5}\n'}, {}, r"a\.jsonl, line 61"),
}
REFUSED["cut short"][1]["train.jsonl.gz"] = gzip.compress(b"\n".join([OF_PAPERS["test.jsonl"]] * 9))[:-9]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_corpus_is_refused_by_name(case: str, tmp_path: Path):
    name, files, given, message = REFUSED[case]
    root = tmp_path / ("mine" if files is not None else "absent")
    if files is not None:
        root.mkdir()
    for file, content in (files or {}).items():
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        texts(name, **{"root": root, **given})
