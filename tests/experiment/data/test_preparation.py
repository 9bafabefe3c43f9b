import hashlib
import json
import os
import shutil
import threading
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from landmark.experiment.data import SPLITS, Corpus, Tokenizer, find, load_tokenizer, open_corpus, prepare
from landmark.experiment.data.preparation import batches_of, check_texts
from landmark.experiment.data.sources import Document, open_source
from landmark.experiment.data.stream import Stream
from landmark.experiment.data.windows import TrainingWindows
from landmark.utils.errors import UserError


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.bin"))}


@pytest.fixture
def corpus(books: Path, byte_tokenizer: Tokenizer, tmp_path: Path) -> Corpus:
    """The books of tmp_path / "books" in tmp_path / "cache"."""
    return prepare("pg19", byte_tokenizer, tmp_path / "cache", path=books, progress=False)


@pytest.mark.parametrize(("name", "tokenizer"), [("pg19", "byte_tokenizer"), ("stdlib", "gpt2")])
def test_streams_are_those_written_out(request, books: Path, tmp_path: Path, name: str, tokenizer: str):
    """Of the standard library, in the tokens of tiktoken: hundreds of documents, short and long beside each other."""
    tokenizer, path = request.getfixturevalue(tokenizer), books if name == "pg19" else None
    encode = request.getfixturevalue("tiktoken_gpt2").encode_ordinary if path is None else lambda text: [*text.encode()]
    corpus = prepare(name, tokenizer, tmp_path, path=path, max_documents=150, progress=False)
    for split in SPLITS:
        documents = islice(open_source(name, path).documents(split), 150)
        texts = [document.text for document in documents if document.text]
        content = np.concatenate([np.append(encode(text), tokenizer.eot) for text in texts]).astype("<u2")
        stream, counts = corpus.split(split), corpus.manifest["splits"][split]
        assert stream.tokens.tobytes() == content.tobytes()
        assert (len(stream), stream.tokens.dtype, counts["documents"]) == (len(content), np.uint16, len(texts))
        assert counts["bytes"] == sum(len(text.encode()) for text in texts)
        assert counts["words"] == sum(len(text.split()) for text in texts)
        assert stream.sha256 == hashlib.sha256(content.tobytes()).hexdigest()


def test_manifest_says_what_was_prepared_once(corpus, books, byte_tokenizer, tmp_path, monkeypatch):
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    assert manifest == corpus.manifest
    assert manifest["tokenizer"]["hash"] == byte_tokenizer.hash
    assert manifest["source"]["origin"] == str(books)
    assert set(manifest["splits"]["test"]) == {
        *("file", "tokens", "documents", "bytes", "words", "sha256", "texts_sha256")
    }
    assert corpus.folder.name.startswith("pg19-bytes-")
    assert sorted(file.name for file in corpus.folder.iterdir()) == [
        *("manifest.json", "test.bin", "train.bin", "validation.bin", "verified.json")
    ]
    with pytest.raises(UserError, match="unknown split 'dev': choose one of train, validation, test"):
        corpus.split("dev")
    assert find("pg19", byte_tokenizer, tmp_path / "other", path=books) is None
    assert not (tmp_path / "other").exists()
    monkeypatch.setattr("landmark.experiment.data.preparation._write_corpus", None)
    assert prepare("pg19", byte_tokenizer, tmp_path / "cache", path=books).folder == corpus.folder
    found = find("pg19", byte_tokenizer, tmp_path / "cache", path=books)
    assert found.manifest == corpus.manifest


def test_changed_data_are_other_corpora_and_a_prepared_folder_can_be_the_path(corpus, books, byte_tokenizer, tmp_path):
    few = prepare("pg19", byte_tokenizer, tmp_path / "cache", path=books, max_documents=2, progress=False)
    assert [few.manifest["splits"][split]["documents"] for split in ("train", "test")] == [2, 1]
    assert few.folder != corpus.folder
    with pytest.raises(UserError, match="max_documents=0"):
        prepare("pg19", byte_tokenizer, tmp_path, path=books, max_documents=0)
    (books / "test" / "8.txt").write_text("eight")
    after = prepare("pg19", byte_tokenizer, tmp_path / "cache", path=books, progress=False)
    assert len(after.split("test")) == len(corpus.split("test")) + len("eight") + 1
    assert after.split("train").sha256 == corpus.split("train").sha256
    moved = corpus.folder.rename(tmp_path / "carried")
    for opened in (find, prepare):
        found = opened("pg19", byte_tokenizer, tmp_path / "none", path=moved)
        assert found.split("train").sha256 == corpus.manifest["splits"]["train"]["sha256"]
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="carried was prepared with another tokenizer than code"):
        find("pg19", load_tokenizer("code"), tmp_path / "none", path=moved)


def test_a_text_that_changed_under_the_same_size_and_time_is_found_where_all_are_read(
    corpus, books, byte_tokenizer, tmp_path
):
    given = "pg19", byte_tokenizer, tmp_path / "cache"
    assert check_texts(*given, path=books)
    file = min((books / "train").glob("*.txt"))
    content, status = file.read_bytes(), file.stat()
    file.write_bytes(b"#" + content[1:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert prepare(*given, path=books).folder == corpus.folder  # names, sizes and times are the same
    with pytest.raises(UserError, match=r"texts of the split train have changed since .* and prepare it again"):
        check_texts(*given, path=books)
    assert not check_texts(*given, path=corpus.folder)


@pytest.fixture
def many_books(books: Path) -> Path:
    for number in range(100, 160):
        (books / "train" / f"{number}.txt").write_text(f"{number} " * (number % 7 * 50 + 1))
    return books


def test_number_of_cores_does_not_matter(many_books: Path, byte_tokenizer: Tokenizer, tmp_path: Path, monkeypatch):
    found = []
    for cores in (1, 5):
        monkeypatch.setattr("landmark.experiment.data.preparation.cores", lambda cores=cores: cores)
        found.append(prepare("pg19", byte_tokenizer, tmp_path / str(cores), path=many_books, progress=False))
    assert contents(found[0].folder) == contents(found[1].folder)


@pytest.mark.parametrize(("most", "size"), [(10_000, 1), (50_000, 5), (10**7, 200)])
def test_few_documents_are_in_memory_at_a_time(most: int, size: int):
    """Short ones count as 10,000 characters, because they take memory too."""
    documents = [Document(str(number), "short") for number in range(200)]
    batches = list(batches_of(iter(documents), most))
    assert [document for batch in batches for document in batch] == documents
    assert {len(batch) for batch in batches} == {size}
    assert [len(batch) for batch in batches_of([Document("long", "x" * most), *documents[:1]], most)] == [1, 1]


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda content: content + b"\0\0", "bytes long, not"),
        (lambda content: content[:9] + bytes([content[9] ^ 1]) + content[10:], "is damaged, its SHA-256 differs"),
    ],
)
def test_damaged_file_is_noticed_though_its_times_are_the_same(corpus, books, byte_tokenizer, tmp_path, damaged, said):
    """tests/attacks/test_generated.py damages files in more ways."""
    file = corpus.folder / "train.bin"
    content, status = file.read_bytes(), file.stat()
    file.write_bytes(damaged(content))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(UserError, match=rf"train\.bin .*{said}.* and prepare it again"):
            prepare("pg19", byte_tokenizer, tmp_path / "cache", path=books)
    file.write_bytes(content)
    assert open_corpus(corpus.folder).manifest == corpus.manifest


def test_whole_files_are_hashed_once(corpus: Corpus, tmp_path: Path, monkeypatch):
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or digest(file, kind))
    open_corpus(corpus.folder)
    assert hashed == []
    copy = shutil.copytree(corpus.folder, tmp_path / "copy")
    open_corpus(copy)
    open_corpus(copy)
    assert len(hashed) == len(SPLITS)


def test_manifest_cut_short_is_noticed_and_only_streams_are_written_anew(corpus, books, byte_tokenizer, tmp_path):
    def again() -> Corpus:
        return prepare("pg19", byte_tokenizer, tmp_path / "cache", path=books, progress=False)

    before, manifest = contents(corpus.folder), corpus.folder / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:50])
    with pytest.raises(UserError, match=r"manifest\.json is not valid JSON.*and prepare it again"):
        again()
    manifest.unlink()
    (thesis := corpus.folder / "thesis.txt").write_text("years of work")
    for name in ("train.bin", "test.bin"):
        (corpus.folder / name).unlink()
    (corpus.folder / "train.bin").symlink_to(thesis)
    os.mkfifo(corpus.folder / "test.bin")
    assert contents(again().folder) == before
    assert thesis.read_text() == "years of work"


def test_failure_leaves_nothing(books: Path, byte_tokenizer: Tokenizer, tmp_path: Path):
    for content, message in ((b"\xff", r"7\.txt is not text in UTF-8"), (b"", r"split 'test' of .* has no text")):
        (books / "test" / "7.txt").write_bytes(content)
        with pytest.raises(UserError, match=message):
            prepare("pg19", byte_tokenizer, tmp_path / "cache", path=books, progress=False)
        assert find("pg19", byte_tokenizer, tmp_path / "cache", path=books) is None
        assert not list(tmp_path.rglob("*.bin"))


def test_of_callers_at_once_one_works(many_books: Path, byte_tokenizer: Tokenizer, tmp_path: Path, caplog, monkeypatch):
    """And those that wait. tests/test_storage.py kills one anywhere; test_launches.py one with such a lock."""
    encoded, corpora = [], []
    all_asked, encode = threading.Barrier(3), type(byte_tokenizer).encode
    monkeypatch.setattr(type(byte_tokenizer), "encode", lambda self, text: encoded.append(text) or encode(self, text))

    def one() -> None:
        all_asked.wait()
        corpora.append(prepare("pg19", byte_tokenizer, tmp_path / "c", path=many_books, progress=False))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({corpus.folder for corpus in corpora}) == 1
    assert len(corpora) == 3
    assert len(encoded) == len(set(encoded)) == 65
    assert "another process is preparing" in caplog.text


def test_a_stream_is_not_read_into_memory(tmp_path: Path):
    """Windows are cut from a file of a thousand million tokens; no more than they is ever in memory."""
    file = tmp_path / "train.bin"
    with open(file, "wb") as sparse:
        sparse.truncate(2 * 10**9)
    stream = Stream(np.memmap(file, dtype="<u2", mode="r"), "")
    windows = TrainingWindows(stream, length=512, batch_size=8, seed=0, block_size=50, landmark=5, eot=4)
    assert windows.num_starts > 10**9
    tracemalloc.start()
    batches = [windows.batch(step).tokens for step in range(20)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {tuple(batch.shape) for batch in batches} == {(8, 512)}
    assert peak < 10 << 20


def test_real_books_have_the_published_counts(shared: Path, gpt2: Tokenizer, tmp_path: Path):
    books = tmp_path / "books"
    shutil.copytree(shared / "pg19-mini" / "test", books / "test")
    shutil.copytree(shared / "pg19-mini" / "validation", books / "validation")
    shutil.copytree(shared / "pg19-mini" / "validation", books / "train")
    corpus = prepare("pg19", gpt2, tmp_path / "cache", path=books, progress=False)
    counts = [corpus.manifest["splits"][split] for split in ("validation", "test")]
    found = [(each["documents"], each["bytes"], each["tokens"] - each["documents"], each["words"]) for each in counts]
    assert found == [(6, 3_149_349, 798_485, 558_480), (6, 3_335_436, 859_967, 590_337)]
