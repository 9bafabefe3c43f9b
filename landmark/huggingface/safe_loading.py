"""Loading a folder of transformers without running its code, loading pickles, or reading other folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from landmark.utils.errors import UserError
from landmark.utils.files import check_hashes, read_json


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
