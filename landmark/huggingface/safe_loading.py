"""Loading a folder of transformers without running its code, loading pickles, or reading other folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from landmark.utils.errors import UserError
from landmark.utils.files import read_json
from landmark.utils.hashes import check_hashes


def open_model(folder: str | Path, **settings: Any) -> Any:
    """A causal language model from *.safetensors. settings: of `from_pretrained`.

    Raises UserError if the folder's index names a file outside of it, and the errors of `from_pretrained`.
    """
    check_index(Path(folder))
    check_hashes(folder)
    safe = {"trust_remote_code": False, "use_safetensors": True}
    return AutoModelForCausalLM.from_pretrained(folder, **safe | settings)


def open_tokenizer(folder: str | Path, **settings: Any) -> Any:
    """The tokenizer of a folder. settings: of `from_pretrained`."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **settings)


def check_index(folder: Path) -> None:
    """Raise UserError if an index of shards names a file of another folder. Links are allowed: the hub uses them."""
    for index in sorted(folder.glob("*.index.json")):
        for name in set(read_json(index).get("weight_map", {}).values()):
            if name in ("", ".", "..") or Path(name).name != name:
                raise UserError(
                    f"{index} names the file {name!r}, which is not in its folder: nothing is read from there"
                )


def folder_of(name: str) -> Path:
    """The folder `name`, that of a .gguf file (gguf.py), or that of the hub's model of this name, which is downloaded.

    Raises UserError if there is none of these.
    """
    if Path(name).is_dir():
        return Path(name)
    if name.endswith(".gguf") and Path(name).is_file():
        from landmark.huggingface.gguf import converted

        return converted(Path(name))
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:
        raise UserError(
            f"model.name={name}: no such folder, and the hub did not give it ({type(error).__name__}): "
            "name the folder that holds a model's config.json and weights"
        ) from error
