"""The tokenizer `gpt2`."""

from pathlib import Path

from landmark.data.byte_pairs import BytePairTokenizer, first_ids, read_ranks
from landmark.utils.errors import UserError

GPT2_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's pattern with possessive quantifiers: the same pieces, without backtracking over long runs.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class GPT2Tokenizer(BytePairTokenizer):
    """GPT-2's encoding, whole or with fewer merges.

    In a small model a large vocabulary takes most of the time and of the parameters. With a `vocab_size` only the first
    merges are used: ids below vocab_size − 64 are text; the next two are end of text and landmark.
    """

    def __init__(self, file: str | Path | None = None, vocab_size: int | None = None):
        """file: local copy of the ranks (None: they are downloaded when a text is first encoded or decoded).
        vocab_size: None: all ids, padded to 50304.

        Raises UserError if the file is missing, and for a vocabulary that is no multiple of 64 from 320 to 50304.
        """
        if vocab_size is not None and (vocab_size % 64 or not 320 <= vocab_size <= 50304):
            raise UserError(f"tokenizer.vocab_size={vocab_size}: choose a multiple of 64 from 320 to 50304")
        whole = _read_file(Path(file)) if file is not None else None
        name, ids = (
            ("gpt2", (50256, 50260, 50304)) if vocab_size is None else (f"gpt2-{vocab_size}", first_ids(vocab_size))
        )

        def ranks() -> dict[bytes, int]:
            known = _download_ranks() if whole is None else whole
            return known if vocab_size is None else {piece: rank for piece, rank in known.items() if rank < ids[0]}

        super().__init__(name, ranks, GPT2_RANKS_SHA256, GPT2_PATTERN, ids)


def _read_file(file: Path) -> dict[bytes, int]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer.file: cannot read {file}: {error.strerror}") from None
    return read_ranks(content, GPT2_RANKS_SHA256, f"tokenizer.file: {file} is not GPT-2's ranks file")


def _download_ranks() -> dict[bytes, int]:
    from tiktoken_ext import openai_public

    try:
        return openai_public.r50k_base()["mergeable_ranks"]  # tiktoken checks the same hash
    except Exception as error:
        raise UserError(
            f"tokenizer=gpt2: its ranks could not be downloaded ({type(error).__name__}): "
            "set tokenizer.file to a local gpt2.tiktoken (r50k_base), or choose tokenizer=bytes, which needs no file"
        ) from None
