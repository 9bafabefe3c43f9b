"""Tokenizers: text to ids and back. End of text, landmark id and the padded vocabulary belong to them."""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from landmark.utils.errors import UserError

GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# The possessive form of GPT-2's pattern: the same pieces, without backtracking over long runs.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Tokenizer(Protocol):
    """What is asked of a tokenizer. Ids are of `dtype`; `eot` and `landmark` carry no text."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int:
        """Rows of the embedding matrix, unused padding ids included."""
        ...

    @property
    def eot(self) -> int: ...
    @property
    def landmark(self) -> int: ...
    @property
    def hash(self) -> str:
        """Hex SHA-256 of what decides the ids of a text, the special ids and the vocabulary."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Little-endian uint16 or uint32: the smallest that holds the vocabulary."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: UTF-8 bytes each id stands for, 0 for special and unused ids."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, without end of text; text that looks like a special token is ordinary text."""
        ...

    def encode_batch(self, texts: Iterable[str], threads: int = 1) -> list[np.ndarray]: ...

    def decode_bytes(self, ids: Sequence[int] | np.ndarray, special: bytes = b"") -> bytes:
        """The bytes of some ids; `special` in the place of each special or unused id."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of some ids: special ids vanish, a character cut at an end becomes U+FFFD."""
        ...


def load_tokenizer(name: str, file: str | Path | None = None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer `gpt2` or `bytes`, or with `pretrained` that of a transformers model in the folder `file`.

    file: of gpt2, a local copy of its ranks; vocab_size: as `GPT2Tokenizer` has it.

    Raises UserError: unknown name; ranks file missing or with the wrong hash; neither file nor network; a vocabulary
    that cannot be.
    """
    if name == "bytes":
        for key, value in {"file": file, "vocab_size": vocab_size}.items():
            if value is not None:
                raise UserError(f"tokenizer=bytes has no {key}, but tokenizer.{key} is {value}: leave it out")
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(file, vocab_size)
    if name == "pretrained":
        from landmark.data.pretrained_tokenizer import open_pretrained

        if file is None:
            raise UserError("tokenizer=pretrained: tokenizer.file must name the folder of a model, as model.name does")
        return open_pretrained(file)
    raise UserError(f"unknown tokenizer {name!r}: choose gpt2, bytes or pretrained")


class BytePieces:
    """What tokenizers share whose ids stand for byte strings; `decisive` is what else decides their ids."""

    def __init__(self, name: str, eot: int, landmark: int, vocab_size: int, pieces: dict[int, bytes], **decisive: str):
        self.name = name
        self.eot = eot
        self.landmark = landmark
        self.vocab_size = vocab_size
        self.dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
        self._pieces = [pieces.get(token, b"") for token in range(vocab_size)]
        self.byte_lengths = np.array([len(piece) for piece in self._pieces], dtype=np.int64)
        settings = {"name": name, "eot": eot, "landmark": landmark, "vocab_size": vocab_size, **decisive}
        self.hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def encode_batch(self, texts: Iterable[str], threads: int = 1) -> list[np.ndarray]:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.encode, texts))

    def decode_bytes(self, ids: Sequence[int] | np.ndarray, special: bytes = b"") -> bytes:
        return b"".join([self._pieces[token] or special for token in np.asarray(ids).tolist()])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class ByteTokenizer(BytePieces):
    """UTF-8 bytes as ids 0–255. The vocabulary of 258 is padded to 320, a multiple of 64: the width at which
    the output matrix multiplication is fast on GPUs (GPT-2's 50257 goes to 50304 for the same reason)."""

    def __init__(self):
        pieces = {value: bytes([value]) for value in range(256)}
        super().__init__("bytes", 256, 257, 320, pieces, encoding="utf-8")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype)


class GPT2Tokenizer(BytePieces):
    """GPT-2's byte-pair encoding, by tiktoken (which lets go of the interpreter lock: threads do help).

    vocab_size: None for all 50257 ids, padded to 50304. Else the encoding stops merging early: the first
    vocab_size − 64 ids stand for text, end of text and the landmark come next. Small models spend most of their time
    and parameters on a large vocabulary.
    """

    def __init__(self, file: str | Path | None = None, vocab_size: int | None = None):
        """Raises UserError: no ranks; a vocabulary that is no multiple of 64 from 320 to 50304."""
        import tiktoken

        if vocab_size is not None and (vocab_size % 64 or not 320 <= vocab_size <= 50304):
            raise UserError(f"tokenizer.vocab_size={vocab_size}: choose a multiple of 64 from 320 to 50304")
        ranks = _read_ranks(Path(file)) if file is not None else _download_ranks()
        if vocab_size is None:
            name, eot, landmark = "gpt2", 50256, 50260
        else:
            name, eot, landmark = f"gpt2-{vocab_size}", vocab_size - 64, vocab_size - 63
            ranks = {piece: rank for piece, rank in ranks.items() if rank < eot}
        pieces = {rank: piece for piece, rank in ranks.items()}
        super().__init__(
            name, eot, landmark, vocab_size or 50304, pieces, ranks=GPT2_RANKS_SHA256, pattern=GPT2_PATTERN
        )  # fmt: skip
        # Never taken from a text, but with no special token at all tiktoken looks for one at every character.
        special = {"<|endoftext|>": self.eot}
        self._encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)


def _read_ranks(file: Path) -> dict[bytes, int]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer.file: cannot read {file}: {error.strerror}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != GPT2_RANKS_SHA256:
        raise UserError(
            f"tokenizer.file: {file} is not GPT-2's ranks file: its sha256 is {found}, "
            f"expected {GPT2_RANKS_SHA256}; fetch it again"
        )
    return {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, content.splitlines())}


def _download_ranks() -> dict[bytes, int]:
    from tiktoken_ext import openai_public

    try:
        return openai_public.r50k_base()["mergeable_ranks"]  # tiktoken checks the same hash
    except Exception as error:
        raise UserError(
            f"tokenizer=gpt2: its ranks could not be downloaded ({type(error).__name__}): "
            "set tokenizer.file to a local gpt2.tiktoken (r50k_base)"
        ) from None
