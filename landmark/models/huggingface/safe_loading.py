"""Loading a folder of transformers without running its code, loading pickles, or reading other folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from landmark.models.gguf.file import is_gguf, opened
from landmark.models.gguf.opening import open_gguf
from landmark.models.gguf.quantising import check_bits, quantise
from landmark.models.gguf.tokenizer import tokenizer_of
from landmark.utils.errors import UserError, counted, in_one_line
from landmark.utils.files import HASHES, check_files, read_hashes, read_json

CONFIG, ADAPTER = "config.json", "adapter_config.json"
_REMEDY = "name the folder of a model, or get it again"


def open_model(folder: str | Path, bits: int | None = None, **settings: Any) -> Any:
    """A causal language model from *.safetensors, or of a .gguf file. bits: 4 or 8, of the linear layers of a folder
    (None: as they are). settings: of `from_pretrained`. Raises UserError for a folder that holds none, is damaged, or
    names code or another folder, and for bits that cannot be had.
    """
    folder = Path(folder)
    check_folder(folder)
    if is_gguf(folder):
        if bits is not None:
            raise UserError(f"model.bits={bits}: {folder.name} has its own bits; bits are for folders of safetensors")
        return _open_file(folder, **settings)
    if bits is not None:
        settings["dtype"] = _type_of_integers(settings.get("dtype"))
        check_bits(bits, settings["dtype"], _device(settings.get("device_map")))
    safe = {"trust_remote_code": False, "use_safetensors": True, "output_loading_info": True}
    with readable(folder, "causal language model"):
        opened: Any = AutoModelForCausalLM.from_pretrained(folder, **safe | settings)
    model, told = opened
    if missing := sorted(told["missing_keys"]):  # which transformers draws at random
        raise UserError(f"{folder}: {counted(len(missing), 'weight')} missing, {missing[0]} is the first: {_REMEDY}")
    return model if bits is None else quantise(model, bits, str(folder))


def _open_file(
    file: Path,
    *,
    dtype: torch.dtype | str | None = None,
    device_map: str | torch.device | None = None,
    attn_implementation: str | None = None,
    local_files_only: bool = True,
) -> Any:
    """The model of a .gguf file."""
    settings = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with readable(file, "causal language model"):
        return open_gguf(file, _type_of_integers(dtype), _device(device_map), **settings)


def _type_of_integers(dtype: torch.dtype | str | None) -> torch.dtype:
    """The type that goes with weights of few bits where none is named (None or "auto") is bfloat16."""
    return torch.bfloat16 if dtype in (None, "auto") else getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _device(device_map: str | torch.device | None) -> str | torch.device:
    return "cpu" if device_map in (None, "auto") else device_map


def open_tokenizer(folder: str | Path, **settings: Any) -> Any:
    """The tokenizer of a folder or of a .gguf file. settings: of `from_pretrained`. Raises UserError where there is
    none.
    """
    with readable(folder, "tokenizer"):
        if is_gguf(folder):
            tokenizer = tokenizer_of(opened(folder))
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **settings)
        tokenizer("a")  # settings of a wrong type show when a text is read
        return tokenizer


@contextmanager
def readable(folder: str | Path, what: str) -> Iterator[None]:
    """Raise UserError for the many kinds of errors that transformers, safetensors and torch raise for a bad folder."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        detail = in_one_line(error)[:300]
        raise UserError(
            f"{folder} holds no {what} that transformers can read: {detail or type(error).__name__}"
        ) from error


def check_folder(folder: Path) -> None:
    """Raise UserError where a folder names code or weights outside of it (the hub's links may), or has changed, or a
    .gguf file is not whole.
    """
    if is_gguf(folder):
        opened(folder)
        return
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder} is an adapter, which names another model: load that model, and the adapter with peft"
        )
    check_files(folder)
    config = read_json(folder / CONFIG, {}, _REMEDY)
    if "model_type" not in config:
        raise UserError(f"{folder} is no folder of transformers; landmark.load opens runs of this package")
    if elsewhere := [value for value in _implementations(config) if re.search(r"\W", value)]:
        raise UserError(f"{folder / CONFIG} names the kernels {elsewhere[0]!r}: they are not fetched or run")
    for index in sorted(folder.glob("*.index.json")):
        for name in set(read_json(index, {"weight_map": dict}, _REMEDY)["weight_map"].values()):
            if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
                raise UserError(
                    f"{index} names the file {name!r}, which is not in its folder: nothing is read from there"
                )
    if os.path.lexists(folder / HASHES) or (folder / "run.json").exists():
        read_hashes(folder, [CONFIG, *(path.name for path in folder.glob("*.safetensors"))])


def _implementations(value: Any, is_named: bool = False) -> Iterator[str]:
    """The implementations of attention that a configuration names, at any depth."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _implementations(each, is_named or key.endswith("attn_implementation"))
    elif is_named and value is not None:
        yield str(value)
