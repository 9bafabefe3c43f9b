"""The authors' released weights: what fine-tuning with landmarks added to LLaMA 7B, in the format of transformers. The
embeddings of two further tokens, for padding and the landmark, are added to the mean of LLaMA's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from landmark.memory.landmarks.settings import MemorySettings
from landmark.models.huggingface.model import LandmarkModel, LandmarkSettings
from landmark.models.huggingface.safe_loading import open_model, open_tokenizer
from landmark.models.huggingface.wrapping import attach, embedding_weights
from landmark.utils.constants import DEFAULT_CHUNK, LANDMARK
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import read_json

BLOCK_SIZE = 50
LLAMA_7B_SUM = 49798.7656  # of all weights of the authors' model, in float32
_DERIVED = "rotary_emb.inv_freq"  # stored by the versions of transformers of that time


@torch.no_grad()
def recover(
    base: str | Path, diff: str | Path, *, local: int = DEFAULT_CHUNK, check_sum: float | None = None, **memory: Any
) -> tuple[LandmarkModel, Any]:
    """The authors' model and its tokenizer: LLaMA's weights and the released difference. base, diff: their folders.
    local: tokens read at a time. check_sum: of all weights, within 0.01; `LLAMA_7B_SUM` for LLaMA 7B; None: any.
    memory: settings of `MemorySettings`. Raises UserError for a folder without weights, weights that do not fit, a
    tokenizer without `<landmark>`, and another sum.
    """
    base, diff = Path(base), Path(diff)
    for folder in (base, diff):
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no config.json: name a folder in the format of transformers")
    settings = read_json(diff / "config.json")
    tokenizer = open_tokenizer(diff, local_files_only=True)
    if (token := tokenizer.get_vocab().get(LANDMARK)) is None:
        raise UserError(f"{diff}: its tokenizer has no {LANDMARK}: is this the difference that the authors released?")
    # Both folders may hold pickles, as the released one does; weights_only makes torch load tensors alone.
    model = open_model(base, dtype=torch.float32, local_files_only=True, use_safetensors=None, weights_only=True)
    rows = model.config.vocab_size
    model.resize_token_embeddings(int(settings["vocab_size"]), mean_resizing=False)
    for weight in embedding_weights(model):
        weight[rows:] = weight[:rows].mean(0)
    _add_difference(model, diff)
    if check_sum is not None:
        found = sum(weight.sum() for weight in model.state_dict().values())
        if abs(float(found) - check_sum) > 1e-2:
            raise UserError(f"{base} + {diff}: all weights add up to {float(found):.4f}, not to {check_sum}")
    block_size, reading = int(settings.get("mem_freq", BLOCK_SIZE)), MemorySettings().updated(memory)
    return attach(model, LandmarkSettings(token, block_size, local, reading, landmark_positions=True)), tokenizer


def _add_difference(model: Any, diff: Path) -> None:
    """Add the differences in a folder. Raises UserError unless every weight of the model has one."""
    weights = model.state_dict()
    missing = set(weights)
    for name, difference in _tensors(diff):
        if name.endswith(_DERIVED):
            continue
        if name not in weights or weights[name].shape != difference.shape:
            shape = tuple(weights[name].shape) if name in weights else "nothing"
            raise UserError(
                f"{diff}: {name} of {tuple(difference.shape)} does not fit {shape} in the base: is it another model?"
            )
        if name in missing:
            weights[name].add_(difference)
            missing.discard(name)
    if missing:
        raise UserError(
            f"{diff}: has no difference for {sorted(missing)[0]} and {len(missing) - 1} more: is a file missing?"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder by name, with one file in memory at a time."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"{folder} holds no weights: neither *.safetensors nor pytorch_model*.bin")
    for file in files:
        try:
            if file.suffix == ".safetensors":
                tensors = load_file(file)
            else:
                tensors = torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise UserError(f"{file} is damaged ({in_one_line(error)[:200]}): get it again") from error
        yield from tensors.items()
