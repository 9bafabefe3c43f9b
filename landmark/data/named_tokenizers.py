"""Tokenizers by the name that `tokenizer=` gives them."""

from pathlib import Path

from landmark.data.byte_tokenizer import ByteTokenizer
from landmark.data.gpt2_tokenizer import GPT2Tokenizer
from landmark.data.pretrained_tokenizer import open_pretrained
from landmark.data.tokenizer import Tokenizer
from landmark.utils.errors import UserError


def load_tokenizer(name: str, file: str | Path | None = None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer `bytes`, `gpt2`, or `pretrained`, that of a transformers model.

    file: local copy of GPT-2's ranks, or the model's folder. vocab_size: of gpt2, as `GPT2Tokenizer` takes it.

    Raises UserError for an unknown name, a vocabulary that cannot be, a file that is missing or not the right one.
    """
    if name == "bytes":
        for key, value in {"file": file, "vocab_size": vocab_size}.items():
            if value is not None:
                raise UserError(f"tokenizer=bytes has no {key}, but tokenizer.{key} is {value}: leave it out")
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(file, vocab_size)
    if name == "pretrained":
        if file is None:
            raise UserError("tokenizer=pretrained: tokenizer.file must name the folder of a model, as model.name does")
        return open_pretrained(file)
    raise UserError(f"unknown tokenizer {name!r}: choose gpt2, bytes or pretrained")
