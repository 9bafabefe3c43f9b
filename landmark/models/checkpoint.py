"""A trained model on disk: `config.json` and `model.safetensors`, without code that runs when it is loaded."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from landmark.models.config import DecoderConfig
from landmark.models.construction import new_decoder
from landmark.models.decoder import Decoder
from landmark.models.language_model import LanguageModel
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_atomic, write_json

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# Names in the authors' public code, and ours.
_AUTHORS_NAMES = {
    r"transformer\.wte\.weight": "embedding.weight",
    r"transformer\.ln_f\.weight": "norm.weight",
    r"rem_token_embedding\.weight": "cmt.weight",
    r"transformer\.h\.(\d+)\.ln_1\.weight": r"blocks.\1.attention_norm.weight",
    r"transformer\.h\.(\d+)\.attn\.c_attn\.weight": r"blocks.\1.attention.qkv.weight",
    r"transformer\.h\.(\d+)\.attn\.c_proj\.weight": r"blocks.\1.attention.out.weight",
    r"transformer\.h\.(\d+)\.ln_2\.weight": r"blocks.\1.mlp_norm.weight",
    r"transformer\.h\.(\d+)\.mlp\.c_fc\.weight": r"blocks.\1.mlp_in.weight",
    r"transformer\.h\.(\d+)\.mlp\.c_proj\.weight": r"blocks.\1.mlp_out.weight",
}


def from_authors_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by our names, some of which may have the names of the authors' code. The tied head is left out."""
    renamed = {}
    for name, tensor in weights.items():
        for pattern, ours in _AUTHORS_NAMES.items():
            if re.fullmatch(pattern, name):
                renamed[re.sub(pattern, ours, name)] = tensor
                break
        else:
            if name != "lm_head.weight":
                renamed[name] = tensor
    return renamed


def save(model: LanguageModel, folder: Path | str, state: dict[str, Tensor] | None = None) -> None:
    """Write a model's configuration and weights, each whole or not at all.

    state: the weights, where this process has only a share of them (None: the model's).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(model, Decoder):
        model.save(folder, state)
        return
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in (state or model.state_dict()).items()}
    write_atomic(folder / WEIGHTS, save_tensors(weights, metadata={"format": "pt"}))
    write_json(folder / CONFIG, dataclasses.asdict(model.config))


def load(
    folder: Path | str, expected: DecoderConfig | None = None, device: str | torch.device = "cpu"
) -> LanguageModel:
    """Read a model back, in evaluation mode; also one with the authors' names of weights, or one of transformers.

    Raises UserError where a file is missing or cut short, or where the configuration is not the `expected` one (None:
    any). The message names the differences; a different backend is none.
    """
    folder = Path(folder)
    if (folder / CONFIG).is_file() and "model_type" in read_json(folder / CONFIG):
        from landmark.models.pretrained import load_pretrained

        return load_pretrained(folder, expected).to(device).eval()
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: is this the folder of a finished run?")
    known = {field.name for field in dataclasses.fields(DecoderConfig)}
    stored = read_json(folder / CONFIG)
    if not isinstance(stored, dict) or not set(stored) <= known:
        raise UserError(f"{folder / CONFIG}: not the configuration of a model of this version")
    config = DecoderConfig(**stored)
    if expected is not None:
        check_same(config, expected, where=folder)
    try:
        weights = load_tensors((folder / WEIGHTS).read_bytes())
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is damaged ({error}): delete the folder and train again") from error
    model = new_decoder(config)
    try:
        model.load_state_dict(from_authors_names(weights))
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise UserError(f"{folder / WEIGHTS} does not fit {folder / CONFIG}: {detail}") from error
    return model.to(device).eval()


def check_same(stored: DecoderConfig, expected: DecoderConfig, where: Path | str) -> None:
    """Raise UserError that names every field in which two configurations differ."""
    ours, theirs = dataclasses.asdict(expected), dataclasses.asdict(stored)
    different = [
        f"{name} is {theirs[name]}, not {ours[name]}"
        for name in ours
        if name != "backend" and ours[name] != theirs[name]
    ]
    if different:
        raise UserError(f"{where} holds a model of another configuration: {'; '.join(different)}")
