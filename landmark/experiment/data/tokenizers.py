"""Tokenizers: text to ids and back. `load_tokenizer` makes one by its name in `tokenizer=`."""

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from landmark.utils.constants import LANDMARK
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import check_files, open_written
from landmark.utils.landmark_token import new_landmark

if TYPE_CHECKING:
    import tiktoken

GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's pattern with possessive quantifiers: the same pieces, without backtracking over long runs.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# Learned by tiktoken._educational.bpe_train from 200 stretches of the library of Python 3.11.7.
CODE_RANKS = Path(__file__).with_name("code.tiktoken")
CODE_RANKS_SHA256 = "f63f53e5f04341f1f02d374e9cf31d2f03e9de4dfaf325727633ab67d322f4a5"
# Ends of lines with the indentation that follows; names with the underscores before them, numbers, signs, each with one
# space before; other whitespace. Every character matches, without backtracking over long runs.
CODE_PATTERN = r"""[\r\n]++[ \t]*+| ?(?:_++\p{L}*+|\p{L}++)| ?\p{N}++| ?[^\s\p{L}\p{N}_]++|[^\S\r\n]++"""
Ranks = dict[bytes, int]


class Tokenizer:
    """Text to ids and back. An id is some bytes: none for end of text, landmark and unused ids. dtype: of ids."""

    def __init__(self, name: str, eot: int, landmark: int, vocab_size: int):
        """name: in names of prepared corpora. eot: id after every document. vocab_size: with unused padding ids."""
        self.name, self.eot, self.landmark, self.vocab_size = name, eot, landmark, vocab_size
        self.dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")

    def described(self) -> dict[str, str]:
        """What decides the ids of a text, besides the name and the special ids."""
        raise NotImplementedError

    def piece(self, token: int) -> bytes:
        """The bytes of an id. Raises UserError where they cannot be loaded."""
        raise NotImplementedError

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, without end of text. Text that looks like a special token is encoded as ordinary text."""
        raise NotImplementedError

    @functools.cached_property
    def hash(self) -> str:
        """Hex SHA-256 of everything that decides the ids of a text."""
        ids = {"name": self.name, "eot": self.eot, "landmark": self.landmark, "vocab_size": self.vocab_size}
        return hashlib.sha256(json.dumps(ids | self.described(), sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of each id, (vocab_size,) int64. Raises UserError where the pieces of text cannot be loaded."""
        return np.array([len(self.piece(token)) for token in range(self.vocab_size)], dtype=np.int64)

    @property
    def beginning(self) -> list[int]:
        """Ids before every text that a model reads."""
        return []

    def encode_with_ends(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids (n,) of a text, and the byte of the text at which each ends, (n,) int64."""
        ids = self.encode(text)
        return ids, self.byte_lengths[ids].cumsum()

    def decode_bytes(self, ids: Sequence[int] | np.ndarray, special: bytes = b"") -> bytes:
        """The bytes of ids, with `special` for each special or unused id."""
        return b"".join([self.piece(token) or special for token in np.asarray(ids).tolist()])

    def written(self, ids: Sequence[int]) -> bytes:
        """The bytes of generated ids."""
        return self.decode_bytes(ids)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, without special ids; a character that is cut at an end becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0…255. Vocabularies are padded to a multiple of 64, for which GPUs are fast."""

    def __init__(self):
        super().__init__("bytes", 256, 257, 320)

    def described(self) -> dict[str, str]:
        return {"encoding": "utf-8"}

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype)


class BytePairTokenizer(Tokenizer):
    """Cuts a text into pieces by a pattern, and joins bytes, lowest rank first, by tiktoken. Text is below `eot`."""

    def __init__(
        self, name: str, ranks: Callable[[], Ranks], ranks_sha256: str, pattern: str, ids: tuple[int, int, int]
    ):
        """ranks: loads the ids of strings of bytes when needed. ranks_sha256: of their file. pattern: matches every
        character of any text. ids: end of text, landmark, and the size of the vocabulary.
        """
        super().__init__(name, *ids)
        self._ranks, self._ranks_sha256, self._pattern = ranks, ranks_sha256, pattern

    def described(self) -> dict[str, str]:
        return {"ranks": self._ranks_sha256, "pattern": self._pattern}

    @functools.cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        ranks = {piece: rank for piece, rank in self._ranks().items() if rank < self.eot}
        # No text is encoded to it, but without any special token tiktoken looks for one at every character.
        special = {"<|endoftext|>": self.eot}
        return tiktoken.Encoding(self.name, pat_str=self._pattern, mergeable_ranks=ranks, special_tokens=special)

    def piece(self, token: int) -> bytes:
        encoding = self._encoding
        return encoding.decode_single_token_bytes(token) if token < self.eot else b""

    def encode(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)


def gpt2_tokenizer(file: str | Path | None = None, vocab_size: int | None = None) -> BytePairTokenizer:
    """GPT-2's encoding, whole or with its first merges: a large vocabulary takes most of a small model.

    file: local copy of the ranks (None: downloaded when needed). vocab_size: a multiple of 64 from 320 on, of which ids
    below vocab_size − 64 are text, the next two end of text and landmark (None: all ids, padded to 50304). Raises
    UserError for another, and for a wrong file.
    """
    if vocab_size is not None and (vocab_size % 64 or not 320 <= vocab_size <= 50304):
        raise UserError(f"tokenizer.vocab_size={vocab_size}: choose a multiple of 64 from 320 to 50304")
    ranks = _download_gpt2_ranks
    if file is not None:
        whole = _read_ranks(Path(file), GPT2_RANKS_SHA256, "name another tokenizer.file")
        ranks = lambda: whole  # noqa: E731
    if vocab_size is None:
        return BytePairTokenizer("gpt2", ranks, GPT2_RANKS_SHA256, GPT2_PATTERN, (50256, 50260, 50304))
    return BytePairTokenizer(
        f"gpt2-{vocab_size}", ranks, GPT2_RANKS_SHA256, GPT2_PATTERN, (vocab_size - 64, vocab_size - 63, vocab_size)
    )


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of transformers, of bytes or of pieces with ▁ for a space. `<landmark>` is added if it is missing."""

    def __init__(self, inner: Any, where: str = "the tokenizer"):
        """inner: a fast tokenizer with end of text, else raises UserError. where: its place, for messages."""
        if getattr(inner, "backend_tokenizer", None) is None:
            raise UserError(f"{where}: not a tokenizer of transformers that uses the library tokenizers")
        if inner.eos_token_id is None:
            raise UserError(f"{where}: has no end of text, which must separate documents: set its eos_token")
        vocabulary = inner.get_vocab()
        if LANDMARK not in vocabulary:
            vocabulary[LANDMARK] = new_landmark(inner)
            inner.add_tokens([LANDMARK], special_tokens=True)
        self.inner = inner
        size = max(vocabulary.values()) + 1  # more than len(inner) where ids are left out
        super().__init__("pretrained", inner.eos_token_id, vocabulary[LANDMARK], size)
        self._pieces = dict.fromkeys({*inner.all_special_ids, *inner.added_tokens_decoder}, b"")
        added = inner.added_tokens_decoder.items()
        self._added = {token: each.content.encode() for token, each in added if not each.special}

    def described(self) -> dict[str, str]:
        """Takes seconds for a large vocabulary."""
        backend = json.loads(self.inner.backend_tokenizer.to_str())
        decisive = {key: backend[key] for key in ("normalizer", "pre_tokenizer", "model")}
        return {"backend": hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()}

    @functools.cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte of each letter of a byte-level vocabulary; empty for one of pieces."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        is_byte_level = "ByteLevel" in repr(self.inner.backend_tokenizer.decoder)
        return {letter: byte for byte, letter in bytes_to_unicode().items()} if is_byte_level else {}

    def piece(self, token: int) -> bytes:
        if token not in self._pieces:
            text = self.inner.backend_tokenizer.id_to_token(token) or ""
            if self._byte_of:
                piece = bytes(self._byte_of[letter] for letter in text)
            elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                piece = bytes([int(text[3:5], 16)])
            else:
                piece = text.replace("▁", " ").encode()
            self._pieces[token] = piece
        return self._pieces[token]

    def written(self, ids: Sequence[int]) -> bytes:
        """As in `Tokenizer`: also of added tokens, as Gemma's line ends, which recorded bits per byte do not count."""
        return b"".join([self._added.get(token) or self.piece(token) for token in ids])

    @property
    def beginning(self) -> list[int]:
        """Ids that the tokenizer puts before a text, as a model of transformers expects it."""
        ids, bare = (self.inner("a", add_special_tokens=added)["input_ids"] for added in (True, False))
        return ids[: ids.index(bare[0])]

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoded(text)["input_ids"], dtype=self.dtype)

    def encode_with_ends(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As in `Tokenizer`. Where the ids do not spell the text, as after a normalisation or behind an added space, a
        token ends with the character that the library tokenizers names, else with its own last byte."""
        encoded = self._encoded(text, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], dtype=self.dtype)
        if self.decode_bytes(ids) == text.encode():
            return ids, self.byte_lengths[ids].cumsum()
        bytes_before = np.array([0, *(len(character.encode()) for character in text)]).cumsum()
        ends = bytes_before[[end for _, end in encoded["offset_mapping"]]]
        return ids, np.maximum.accumulate(ends)

    def _encoded(self, text: str, **settings: Any) -> Any:
        return self.inner(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **settings)


def load_tokenizer(name: str, file: str | Path | None = None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer `bytes`, `code`, `gpt2` (vocab_size: as of `gpt2_tokenizer`), or `pretrained`. file: local copy of
    GPT-2's ranks, or the folder of a transformers model. Raises UserError for an unknown name, vocabulary or file.
    """
    if name not in ("gpt2", "code", "bytes", "pretrained"):
        raise UserError(f"unknown tokenizer {name!r}: choose gpt2, code, bytes or pretrained")
    for key, value in {"file": file, "vocab_size": vocab_size}.items():
        if value is not None and name in ("bytes", "code"):
            raise UserError(f"tokenizer.{key}={value}: tokenizer={name} has no {key}, set tokenizer.{key}=null")
    if name == "gpt2":
        return gpt2_tokenizer(file, vocab_size)
    if name == "bytes":
        return ByteTokenizer()
    if name == "code":
        ranks = _read_ranks(CODE_RANKS, CODE_RANKS_SHA256, "install landmark again")
        return BytePairTokenizer("code", lambda: ranks, CODE_RANKS_SHA256, CODE_PATTERN, (960, 961, 1024))
    if file is None:
        raise UserError("tokenizer=pretrained: tokenizer.file must name the folder of a model, as model.name does")
    return open_pretrained(file)


def open_pretrained(folder: str | Path) -> PretrainedTokenizer:
    """The tokenizer in a folder, in a .gguf file, or of a name on the hub. Raises UserError if there is none to use."""
    from transformers import AutoTokenizer

    from landmark.models.gguf.file import is_gguf, opened
    from landmark.models.gguf.tokenizer import tokenizer_of

    try:
        if local := Path(folder).is_dir():
            check_files(folder)
        if is_gguf(folder):
            inner = tokenizer_of(opened(folder))
        else:
            inner = AutoTokenizer.from_pretrained(folder, local_files_only=local, trust_remote_code=False)
        inner("a")  # settings of a wrong type show when a text is read
    except UserError:
        raise
    except Exception as error:  # of transformers and tokenizers, which raise many kinds for a damaged folder
        detail = in_one_line(error)[:200]
        raise UserError(f"tokenizer.file={folder}: holds no tokenizer that can be used here: {detail}") from error
    return PretrainedTokenizer(inner, f"tokenizer.file={folder}")


def _read_ranks(file: Path, sha256: str, remedy: str) -> Ranks:
    """The ranks in a file in tiktoken's format: lines of a base64 string of bytes and its rank."""
    with open_written(file, remedy, sha256=sha256, named=f"{sha256[:10]}… of tiktoken's ranks") as content:
        return {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, content)}


def _download_gpt2_ranks() -> Ranks:
    from tiktoken_ext import openai_public

    try:
        return openai_public.r50k_base()["mergeable_ranks"]  # tiktoken checks the same hash
    except Exception as error:
        raise UserError(
            f"GPT-2's ranks, which this tokenizer needs, could not be downloaded ({type(error).__name__}): "
            "set tokenizer.file to a local gpt2.tiktoken (r50k_base), or choose tokenizer=bytes, which needs no file"
        ) from None
