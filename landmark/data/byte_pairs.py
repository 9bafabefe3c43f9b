"""Byte-pair encoding by tiktoken, which runs in parallel threads, and files of ranks in tiktoken's format."""

import base64
import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError

if TYPE_CHECKING:
    import tiktoken


class BytePairTokenizer(Tokenizer):
    """Cuts a text into pieces by a pattern, and joins the bytes of a piece, the pair of the lowest rank first."""

    def __init__(
        self,
        name: str,
        ranks: Callable[[], dict[bytes, int]],
        ranks_sha256: str,
        pattern: str,
        ids: tuple[int, int, int],
    ):
        """
        Args:
            name: name of the tokenizer.
            ranks: loads the ids of strings of bytes, all 256 single bytes among them, when they are first needed.
            ranks_sha256: hash of the file of all ranks, a part of the identity.
            pattern: a regular expression that matches every character of any text.
            ids: end of text, landmark, and the size of the vocabulary.
        """
        self._ranks, self._pattern = functools.cache(ranks), pattern
        super().__init__(
            name,
            *ids,
            lambda: {rank: piece for piece, rank in self._ranks().items()},
            ranks=ranks_sha256,
            pattern=pattern,
        )

    @functools.cached_property
    def _encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        # No text is encoded to it, but without any special token tiktoken looks for one at every character.
        special = {"<|endoftext|>": self.eot}
        return tiktoken.Encoding(
            self.name, pat_str=self._pattern, mergeable_ranks=self._ranks(), special_tokens=special
        )

    def encode(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)


def first_ids(vocab_size: int) -> tuple[int, int, int]:
    """End of text, landmark and size of a vocabulary whose text has the ids below vocab_size − 64."""
    return vocab_size - 64, vocab_size - 63, vocab_size


def read_ranks(content: bytes, sha256: str, fault: str) -> dict[bytes, int]:
    """The ranks in a file's content: lines of a base64 string of bytes and its rank.

    Args:
        content: bytes of the file.
        sha256: hex SHA-256 that the content must have.
        fault: what an error says first, such as the file's name and what it is not.

    Raises UserError if the hash is another one.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UserError(f"{fault}: its sha256 is {found}, expected {sha256}; fetch it again")
    return {base64.b64decode(piece): int(rank) for piece, rank in map(bytes.split, content.splitlines())}


def write_ranks(ranks: dict[bytes, int]) -> bytes:
    """The content of a file of ranks, in the order of the ranks."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ordered)
