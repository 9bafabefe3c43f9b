"""The base class of tokenizers, which have the vocabulary and the ids of end of text and landmark."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np


class Tokenizer:
    """Converts text to ids and back. Each id is a string of bytes, empty for end of text, landmark and unused ids.

    dtype: of ids, uint16 if the vocabulary fits, else uint32, little-endian. hash: hex SHA-256 of everything that
    decides the ids of a text.
    """

    def __init__(
        self,
        name: str,
        eot: int,
        landmark: int,
        vocab_size: int,
        pieces: dict[int, bytes] | Callable[[], dict[int, bytes]],
        **decisive: str,
    ):
        """
        Args:
            name: name of the tokenizer, a part of the names of prepared corpora.
            eot: id of end of text, which follows every document.
            landmark: id of the landmark.
            vocab_size: rows of the embedding matrix, unused padding ids included.
            pieces: the bytes of each id of text, or what loads them when they are first needed.
            decisive: everything else that decides the ids of a text, for the hash.
        """
        self.name = name
        self.eot = eot
        self.landmark = landmark
        self.vocab_size = vocab_size
        self.dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
        self._load = pieces
        settings = {"name": name, "eot": eot, "landmark": landmark, "vocab_size": vocab_size, **decisive}
        self.hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        known = self._load if isinstance(self._load, dict) else self._load()
        return [known.get(token, b"") for token in range(self.vocab_size)]

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of each id, (vocab_size,) int64. Raises UserError where the pieces of text cannot be loaded."""
        return np.array([len(piece) for piece in self._pieces], dtype=np.int64)

    @property
    def beginning(self) -> list[int]:
        """Ids before every text that a model reads."""
        return []

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, without end of text. Text that looks like a special token is encoded as ordinary text."""
        raise NotImplementedError

    def encode_with_ends(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids (n,) of a text, and the byte of the text at which each ends, (n,) int64."""
        ids = self.encode(text)
        return ids, self.byte_lengths[ids].cumsum()

    def decode_bytes(self, ids: Sequence[int] | np.ndarray, special: bytes = b"") -> bytes:
        """The bytes of ids, with `special` for each special or unused id."""
        return b"".join([self._pieces[token] or special for token in np.asarray(ids).tolist()])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, without special ids; a character that is cut at an end becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")
