"""A .gguf file as a folder of transformers, converted once: its weights as float32 numbers, and its tokenizer."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from landmark.huggingface.safe_loading import open_model, open_tokenizer
from landmark.utils.errors import UserError
from landmark.utils.files import delete_leftovers, locked, sha256_file


def converted(file: Path) -> Path:
    """The folder of a .gguf file's model, in the user's cache (`XDG_CACHE_HOME`); the first call writes it, in minutes.

    Raises UserError where the package gguf is missing, and for a file that transformers cannot read.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "landmark" / "gguf"
    status = file.stat()
    folder = cache / f"{file.stem}-{_sha256(file.resolve(), status.st_size, status.st_mtime_ns)[:12]}"
    if folder.is_dir():
        return folder
    print(f"{file}: is converted to {folder}, once, in minutes", file=sys.stderr)
    partial = cache / f".{folder.name}.{os.getpid()}.tmp"
    delete_leftovers(cache.glob(f".{folder.name}.*.tmp"))
    partial.mkdir(parents=True)
    try:
        with locked(partial):
            _convert(file, partial)
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    except (ImportError, ValueError, KeyError, OSError, NotImplementedError) as error:
        detail = " ".join(str(error).split())[:200]
        missing = "pip install gguf" if isinstance(error, ImportError) else detail
        raise UserError(f"model.name={file}: cannot be converted: {missing}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@functools.cache
def _sha256(file: Path, *_: int) -> str:
    """Read once a process, unless its size or time changes: each row of an experiment asks for it."""
    return sha256_file(file)


def _convert(file: Path, folder: Path) -> None:
    given = {"gguf_file": file.name, "local_files_only": True}
    model: Any = open_model(file.parent, dtype=torch.float32, **given)
    if hasattr(model.config, "quantization_config"):  # the weights are numbers now
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    open_tokenizer(file.parent, **given).save_pretrained(folder)
