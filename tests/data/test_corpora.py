import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from landmark.data.sources import SPLITS, open_source
from landmark.data.stdlib import split_of
from landmark.utils.errors import UserError


def write_parquet(file: Path, rows: dict[int, str | None], **columns: list) -> None:
    """A file of the parquet mirror: one book a row, its number at the end of the url."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "short_book_title": [f"Book {number}" for number in rows],
        "publication_date": [1900] * len(rows),
        "url": [f"http://www.gutenberg.org/ebooks/{number}" for number in rows],
        "text": list(rows.values()),
    }
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


def test_raw_books_come_in_the_order_of_their_numbers(books: Path):
    source = open_source("pg19", books)
    assert [document.name for document in source.documents("train")] == ["2", "9", "10"]
    assert next(source.documents("train")).text == "two 二\n"
    assert list(source.documents("train"))[2].text == "ten\r\nmen  naïve\u00a0tea"


def test_parquet_books_are_the_same_documents(books: Path, mirror: Path):
    raw, parquet = open_source("pg19", books), open_source("pg19", mirror)
    for split in SPLITS:
        assert list(parquet.documents(split)) == list(raw.documents(split))


def test_the_hub_is_read_by_name(mirror: Path, books: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    load = datasets.load_dataset
    asked = []

    def from_disk(name: str):
        asked.append(name)
        files = {split: [str(file) for file in mirror.rglob(f"{split}-*.parquet")] for split in SPLITS}
        return load("parquet", data_files=files)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    source = open_source("pg19")
    assert asked == []
    assert list(source.documents("train")) == list(open_source("pg19", books).documents("train"))
    assert asked == ["emozilla/pg19"]


def test_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    import datasets

    def unreachable(name: str):
        raise ConnectionError("Couldn't reach the Hub\nTraceback")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"could not be loaded .*Couldn't reach the Hub\): .*set data\.path") as error:
        list(open_source("pg19").documents("train"))
    assert "\n" not in str(error.value)


def test_identity_changes_with_the_files_and_not_with_the_place(books: Path):
    identity = open_source("pg19", books).identity
    moved = books.rename(books.with_name("moved"))
    assert open_source("pg19", moved).identity == identity
    file = moved / "test" / "7.txt"
    status = file.stat()
    file.write_bytes(file.read_bytes() + b"!")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    grown = open_source("pg19", moved).identity
    file.write_bytes(b"?" * (status.st_size + 1))
    assert len({str(value) for value in (identity, grown, open_source("pg19", moved).identity)}) == 3


def test_missing_and_empty_corpora_are_refused(tmp_path: Path, books: Path):
    with pytest.raises(UserError, match=r"absent is not a folder: give the folder that holds train/"):
        open_source("pg19", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no PG-19 corpus"):
        open_source("pg19", tmp_path / "empty")
    (books / "validation" / "5.txt").unlink()
    with pytest.raises(UserError, match=r"validation is missing or holds no \.txt file"):
        open_source("pg19", books)
    with pytest.raises(UserError, match=r"no \.py file"):
        open_source("stdlib", tmp_path / "empty")
    with pytest.raises(UserError, match=r"data\.name=pg20: there is no landmark/data/pg20\.py that has a make_source"):
        open_source("pg20")


def test_strange_books_are_refused_by_name(books: Path):
    (books / "train" / "2.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"2\.txt is not UTF-8 \(byte 3\)"):
        list(open_source("pg19", books).documents("train"))
    (books / "train" / "notes.txt").write_text("not a book")
    with pytest.raises(UserError, match=r"notes\.txt is not named <number>\.txt"):
        open_source("pg19", books)


def test_strange_parquet_is_refused(mirror: Path):
    file = mirror / "data" / "test-00000-of-00001.parquet"
    write_parquet(file, {7: "x"}, url=["http://example.org/"])
    with pytest.raises(UserError, match=r"row 0 of split 'test' .* ends in no book number"):
        list(open_source("pg19", mirror).documents("test"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="could not be loaded"):
        list(open_source("pg19", mirror).documents("test"))
    file.unlink()
    with pytest.raises(UserError, match="holds no parquet file of split 'test'"):
        open_source("pg19", mirror)


def test_standard_library_is_split_by_name(tmp_path: Path):
    source = open_source("stdlib")
    names = {split: [document.name for document in source.documents(split)] for split in SPLITS}
    for split in SPLITS:
        assert names[split] == sorted(names[split])
        assert {split_of(name) for name in names[split]} == {split}
    everything = [name for split in SPLITS for name in names[split]]
    assert "json/decoder.py" in everything
    assert not [name for name in everything if "site-packages" in name or name.startswith("test/")]
    assert 0.8 < len(names["train"]) / len(everything) < 0.97


def test_python_source_that_is_not_utf8_is_left_out(tmp_path: Path):
    for number in range(60):
        (tmp_path / f"module{number}.py").write_text(f"x = {number}\n")
    train = open_source("stdlib", tmp_path).documents("train")
    name = next(train).name
    (tmp_path / name).write_bytes(b"# caf\xe9\n")
    assert name not in [document.name for document in open_source("stdlib", tmp_path).documents("train")]
