"""The folder of a model: of a .gguf file, or of the hub, too."""

from __future__ import annotations

from pathlib import Path

from landmark.huggingface.gguf import converted
from landmark.utils.errors import UserError


def folder_of(name: str) -> Path:
    """The folder `name`, that of a .gguf file (gguf.py), or that of the hub's model of this name, which is downloaded.

    Raises UserError if there is none of these.
    """
    if Path(name).is_dir():
        return Path(name)
    if name.endswith(".gguf") and Path(name).is_file():
        return converted(Path(name))
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:
        raise UserError(
            f"model.name={name}: no such folder, and the hub did not give it ({type(error).__name__}): "
            "name the folder that holds a model's config.json and weights"
        ) from error
