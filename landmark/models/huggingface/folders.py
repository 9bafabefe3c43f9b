"""Where a model is: a folder, a .gguf file, or the folder that a model of the hub is downloaded to."""

from __future__ import annotations

from pathlib import Path

from landmark.models.gguf.file import is_gguf
from landmark.utils.errors import UserError

_DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_TWICE = ["original/*", "consolidated*.safetensors"]  # the same weights in another form


def folder_of(name: str) -> Path:
    """The folder or .gguf file `name`, or the folder of the hub's model, downloaded. Raises UserError for another."""
    if Path(name).is_dir() or (is_gguf(name) and Path(name).is_file()):
        return Path(name)
    if name.startswith(("/", ".", "~")) or is_gguf(name):
        raise UserError(f"model.name={name}: there is no such folder or file")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED, ignore_patterns=_TWICE))
    except Exception as error:
        raise UserError(
            f"model.name={name}: no such folder, and the hub did not give it ({type(error).__name__}): "
            "name the folder that holds a model's config.json and weights"
        ) from error
