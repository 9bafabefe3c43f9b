"""Tokenizers by their names in `tokenizer=`."""

from pathlib import Path

from landmark.data.byte_tokenizer import ByteTokenizer
from landmark.data.code_tokenizer import CodeTokenizer
from landmark.data.gpt2_tokenizer import GPT2Tokenizer
from landmark.data.pretrained_tokenizer import open_pretrained
from landmark.data.symbol_tokenizer import SymbolTokenizer
from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError


def load_tokenizer(name: str, file: str | Path | None = None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer `bytes`, `code`, `gpt2`, `symbols`, or `pretrained`, which belongs to a transformers model.

    file: local copy of GPT-2's ranks, or the model's folder. vocab_size: for `gpt2`, as in
    `GPT2Tokenizer`; for `symbols`, their number.

    Raises UserError for an unknown name, an impossible vocabulary, and a file that is missing or a wrong one.
    """
    if name not in ("gpt2", "code", "bytes", "symbols", "pretrained"):
        raise UserError(f"unknown tokenizer {name!r}: choose gpt2, code, bytes, symbols or pretrained")
    unused = {"bytes": ("file", "vocab_size"), "code": ("file", "vocab_size"), "symbols": ("file",)}.get(name, ())
    for key, value in {"file": file, "vocab_size": vocab_size}.items():
        if value is not None and key in unused:
            raise UserError(f"tokenizer.{key}={value}: tokenizer={name} has no {key}, set tokenizer.{key}=null")
    if name == "gpt2":
        return GPT2Tokenizer(file, vocab_size)
    if name == "symbols":
        return SymbolTokenizer() if vocab_size is None else SymbolTokenizer(vocab_size)
    if name != "pretrained":
        return ByteTokenizer() if name == "bytes" else CodeTokenizer()
    if file is None:
        raise UserError("tokenizer=pretrained: tokenizer.file must name the folder of a model, as model.name does")
    return open_pretrained(file)
