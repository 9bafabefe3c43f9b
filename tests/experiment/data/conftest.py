"""Small corpora and tokenizers for the tests of landmark.experiment.data."""

import base64
import sys
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from landmark.experiment.data import Tokenizer, load_tokenizer

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real books and GPT-2's ranks."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: it holds the books and the ranks file this test reads")
    return SHARED


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@pytest.fixture(scope="session")
def gpt2(shared: Path) -> Tokenizer:
    return load_tokenizer("gpt2", shared / "tokenizer" / "gpt2.tiktoken")


@pytest.fixture(scope="session")
def tiktoken_gpt2(shared: Path) -> tiktoken.Encoding:
    """GPT-2's encoding as tiktoken alone has it."""
    lines = (shared / "tokenizer" / "gpt2.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, lines)}
    return tiktoken.Encoding("check", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A tiny corpus in PG-19's raw layout; the order of the numbers is not that of the names."""
    texts = {
        "train": {"9": "nine lives\n", "10": "ten\r\nmen  naïve\u00a0tea", "2": "two 二\n"},
        "validation": {"5": "five"},
        "test": {"7": "seven\u3000seas"},
    }
    root = tmp_path / "books"
    for split, documents in texts.items():
        (root / split).mkdir(parents=True)
        for number, text in documents.items():
            (root / split / f"{number}.txt").write_bytes(text.encode())
    return root


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` converts goes to the test's own folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_DATASETS_CACHE", tmp_path / "hf")
