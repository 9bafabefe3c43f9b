"""The tokenizer `gpt2`: byte-pair encoding by tiktoken, which runs in parallel threads."""

import base64
import hashlib
from pathlib import Path

import numpy as np

from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError

GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's pattern with possessive quantifiers: the same pieces, without backtracking over long runs.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class GPT2Tokenizer(Tokenizer):
    """GPT-2's encoding, whole or with fewer merges.

    In a small model a large vocabulary takes most of the time and of the parameters. With a `vocab_size` only the first
    merges are used: ids below vocab_size − 64 are text; the next two are end of text and landmark.
    """

    def __init__(self, file: str | Path | None = None, vocab_size: int | None = None):
        """file: local copy of the ranks (None: they are downloaded). vocab_size: None: all ids, padded to 50304.

        Raises UserError if the ranks are missing, and for a vocabulary that is no multiple of 64 from 320 to 50304.
        """
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
        decisive = {"ranks": GPT2_RANKS_SHA256, "pattern": GPT2_PATTERN}
        super().__init__(name, eot, landmark, vocab_size or 50304, pieces, **decisive)
        # No text is encoded to it, but without any special token tiktoken looks for one at every character.
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
