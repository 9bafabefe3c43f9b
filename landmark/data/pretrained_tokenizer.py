"""The tokenizer `pretrained`: the tokenizer of a transformers model."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from landmark.data.tokenizers import Tokenizer
from landmark.utils.constants import LANDMARK
from landmark.utils.errors import UserError
from landmark.utils.landmark_token import new_landmark


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of transformers: byte-level, or with pieces in which ▁ is a space and <0x0A> a byte.

    The landmark is its token `<landmark>`, which is added if it is missing.
    """

    def __init__(self, inner: Any, where: str = "the tokenizer"):
        """inner: a fast tokenizer of transformers. where: its place, for messages.

        Raises UserError for another tokenizer, and for one without end of text.
        """
        if getattr(inner, "backend_tokenizer", None) is None:
            raise UserError(f"{where}: not a tokenizer of transformers that uses the library tokenizers")
        if inner.eos_token_id is None:
            raise UserError(f"{where}: has no end of text, which must separate documents: set its eos_token")
        if LANDMARK not in inner.get_vocab():
            new_landmark(inner)
            inner.add_tokens([LANDMARK], special_tokens=True)
        self.inner = inner
        vocabulary = inner.get_vocab()
        size = max(vocabulary.values()) + 1  # more than len(inner) where ids are left out
        # Described only where a hash is asked for: large vocabularies take seconds.
        given = inner.eos_token_id, vocabulary[LANDMARK], size, self._spelled
        super().__init__("pretrained", *given, backend=self._described)

    def _spelled(self) -> dict[int, bytes]:
        """The bytes of each id of text."""
        special = set(self.inner.all_special_ids) | set(self.inner.added_tokens_decoder)
        byte_level = "ByteLevel" in repr(self.inner.backend_tokenizer.decoder)
        return {id: _piece(token, byte_level) for token, id in self.inner.get_vocab().items() if id not in special}

    def _described(self) -> str:
        described = json.loads(self.inner.backend_tokenizer.to_str())
        decisive = {key: described[key] for key in ("normalizer", "pre_tokenizer", "model")}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

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


def open_pretrained(folder: str | Path) -> PretrainedTokenizer:
    """The tokenizer in a folder, or of a name on the hub.

    Raises UserError if there is none that can be used.
    """
    from transformers import AutoTokenizer

    try:
        local = Path(folder).is_dir()
        inner = AutoTokenizer.from_pretrained(folder, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise UserError(f"tokenizer.file={folder}: holds no tokenizer that can be used here: {detail}") from error
    return PretrainedTokenizer(inner, f"tokenizer.file={folder}")


def _piece(token: str, byte_level: bool) -> bytes:
    """The bytes of a token."""
    if byte_level:
        return bytes(_BYTES[letter] for letter in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _letters() -> dict[str, int]:
    """The byte of each of GPT-2's letters: printable bytes are their own letters, the others follow from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printed]
    return {chr(value): value for value in printed} | {chr(256 + n): value for n, value in enumerate(others)}


_BYTES = _letters()
