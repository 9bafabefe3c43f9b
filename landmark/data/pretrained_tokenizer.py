"""Tokenizers of transformers, as `landmark.data.tokenizers` has its own."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from landmark.data.tokenizers import BytePieces
from landmark.errors import UserError

LANDMARK = "<landmark>"  # as in `landmark.huggingface`


class PretrainedTokenizer(BytePieces):
    """A model's tokenizer: byte-level, or of pieces in which ▁ stands for a space and <0x0A> for a byte.

    The landmark is its token `<landmark>`, which is added where it has none.
    """

    def __init__(self, folder: str | Path):
        """folder: or a name on the hub. Raises UserError: no tokenizer there, or one without an end of text."""
        from transformers import AutoTokenizer

        try:
            inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=Path(folder).is_dir())
            described = json.loads(inner.backend_tokenizer.to_str())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            detail = " ".join(str(error).split())[:200]
            raise UserError(f"tokenizer.file={folder}: holds no tokenizer that can be used here: {detail}") from error
        if inner.eos_token_id is None:
            raise UserError(f"tokenizer.file={folder}: has no end of text, which parts documents: set its eos_token")
        for part in ("truncation", "padding"):
            described.pop(part, None)
        if LANDMARK not in inner.get_vocab():
            inner.add_tokens([LANDMARK], special_tokens=True)
        self.inner = inner
        special = set(inner.all_special_ids) | set(inner.added_tokens_decoder)
        pieces = {id: _piece(token, described) for token, id in inner.get_vocab().items() if id not in special}
        landmark = inner.convert_tokens_to_ids(LANDMARK)
        decisive = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        super().__init__(
            "pretrained", inner.eos_token_id, landmark, max(len(inner), landmark + 1), pieces, backend=decisive
        )

    def encode(self, text: str) -> np.ndarray:
        ids = self.inner(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        return np.array(ids, dtype=self.dtype)


def _piece(token: str, described: dict[str, Any]) -> bytes:
    """The bytes that a token stands for."""
    if '"ByteLevel"' in json.dumps(described["decoder"]):
        return bytes(_BYTES[letter] for letter in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _letters() -> dict[str, int]:
    """GPT-2's letters for bytes: those that print stand for themselves, the others follow from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in printed]
    return {chr(value): value for value in printed} | {chr(256 + n): value for n, value in enumerate(others)}


_BYTES = _letters()
