"""The folder of a model. A model of the hub is downloaded, and a .gguf file is converted once."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from landmark.huggingface.safe_loading import open_model, open_tokenizer
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import delete_leftovers, locked, name_in_errors, read_json, sha256_file, write_json


def folder_of(name: str) -> Path:
    """The folder `name`, that of a .gguf file, or that of the hub's model, downloaded. Raises UserError for another."""
    if Path(name).is_dir():
        return Path(name)
    if name.endswith(".gguf") and Path(name).is_file():
        return converted(Path(name))
    if name.startswith(("/", ".", "~")) or name.endswith(".gguf"):
        raise UserError(f"model.name={name}: there is no such folder or file")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:
        raise UserError(
            f"model.name={name}: no such folder, and the hub did not give it ({type(error).__name__}): "
            "name the folder that holds a model's config.json and weights"
        ) from error


def converted(file: Path) -> Path:
    """The folder of a .gguf file's model, in the user's cache (`XDG_CACHE_HOME`); the first call writes it.

    Weights are bfloat16 where that is exact, else float32: results and identities are the same in both types. Raises
    UserError where the package gguf is missing, and for a file that transformers cannot read.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "landmark" / "gguf"
    status = file.stat()
    folder = cache / f"{file.stem}-{_sha256(file.resolve(), status.st_size, status.st_mtime_ns)[:12]}"
    if folder.is_dir():
        return folder
    partial = cache / f".{folder.name}.{os.getpid()}.tmp"
    delete_leftovers(cache.glob(f".{folder.name}.*.tmp"))
    partial.mkdir(parents=True)
    try:
        with locked(partial):
            _convert(file, partial, folder)
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    except (ImportError, ValueError, KeyError, OSError, NotImplementedError) as error:
        detail = in_one_line(error)[:200]
        missing = "pip install gguf" if isinstance(error, ImportError) else detail
        raise UserError(f"model.name={file}: cannot be converted: {missing}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@functools.cache
def _sha256(file: Path, *_: int) -> str:
    """Read once a process, unless its size or time changes: each row of an experiment asks for it."""
    return sha256_file(file)


def _convert(file: Path, partial: Path, folder: Path) -> None:
    """Write the model into a partial folder, saying what is done: transformers' own bars show half of the work."""
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]

    print(f"{file}: is converted once to {folder}", file=sys.stderr)
    size = 4 * sum(int(each.n_elements) for each in GGUFReader(file).tensors)
    print(f"1 of 3, the tokenizer (at most {size / 1e9:.1f} GB will be written) …", file=sys.stderr)
    given = {"gguf_file": file.name, "local_files_only": True}
    open_tokenizer(file.parent, **given).save_pretrained(partial)
    # Its class builds it anew, in seconds, and adds to it: the result is saved, and opened as it is from then on.
    tokenizer = open_tokenizer(partial)
    tokenizer.save_pretrained(partial)
    as_it_is = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": tokenizer.padding_side}
    as_it_is["added_tokens_decoder"] = {id: each.__getstate__() for id, each in tokenizer.added_tokens_decoder.items()}
    write_json(path := partial / "tokenizer_config.json", {**read_json(path), **as_it_is})
    print("2 of 3, the weights …", file=sys.stderr)
    model: Any = open_model(file.parent, dtype=torch.float32, **given)
    if hasattr(model.config, "quantization_config"):  # the weights are numbers now
        del model.config.quantization_config
    model.hf_quantizer = None
    if all(bool((weight == weight.bfloat16()).all()) for weight in model.state_dict().values()):
        model.to(torch.bfloat16)
    print("3 of 3, writing them …", file=sys.stderr)
    with name_in_errors(folder):
        model.save_pretrained(partial)
    print("converted", file=sys.stderr)
