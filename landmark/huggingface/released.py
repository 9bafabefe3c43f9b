"""The weights that the authors released: what fine-tuning with landmarks added to LLaMA 7B.

Their folder is one of transformers whose tensors are differences. Two tokens came to the tokenizer, for padding and for
the landmark; the difference of their rows is to the mean of the rows that were there. Whoever has LLaMA's own weights
adds the two.
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

from landmark.huggingface.model import LandmarkModel, LandmarkSettings, attach, embeddings
from landmark.huggingface.opening import open_model, open_tokenizer
from landmark.utils.constants import DEFAULT_CHUNK, LANDMARK
from landmark.utils.errors import UserError
from landmark.utils.files import read_json

BLOCK_SIZE = 50
LLAMA_7B_SUM = 49798.7656  # of all weights of the authors' model, in float32
_DERIVED = "rotary_emb.inv_freq"  # kept by versions of transformers of that time


@torch.no_grad()
def recover(
    base: str | Path, diff: str | Path, *, local: int = DEFAULT_CHUNK, check_sum: float | None = None, **memory: Any
) -> tuple[LandmarkModel, Any]:
    """The authors' model, and its tokenizer, from LLaMA's weights and their difference.

    base: folder of LLaMA in the format of transformers. diff: folder of the difference. local, memory: as
    `landmark.huggingface.wrap` has them. check_sum: sum of all weights, of the released ones `LLAMA_7B_SUM`, to be met
    within 0.01.

    Raises UserError for a folder without weights, for weights that do not fit, for a tokenizer without `<landmark>`,
    and for another sum.
    """
    base, diff = Path(base), Path(diff)
    for folder in (base, diff):
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no config.json: name a folder in the format of transformers")
    settings = read_json(diff / "config.json")
    tokenizer = open_tokenizer(diff, local_files_only=True)
    if (token := tokenizer.get_vocab().get(LANDMARK)) is None:
        raise UserError(f"{diff}: its tokenizer has no {LANDMARK}: is this the difference that the authors released?")
    # Either folder may hold pickles, as the authors released theirs: torch's own reader makes tensors of them alone.
    model = open_model(base, dtype=torch.float32, local_files_only=True, use_safetensors=None, weights_only=True)
    rows = model.config.vocab_size
    model.resize_token_embeddings(int(settings["vocab_size"]), mean_resizing=False)
    for weight in embeddings(model):
        weight[rows:] = weight[:rows].mean(0)
    _add(model, diff)
    if check_sum is not None:
        found = sum(weight.sum() for weight in model.state_dict().values())
        if abs(float(found) - check_sum) > 1e-2:
            raise UserError(f"{base} + {diff}: all weights add up to {float(found):.4f}, not to {check_sum}")
    return attach(model, LandmarkSettings(token, int(settings.get("mem_freq", BLOCK_SIZE)), local, memory)), tokenizer


def _add(model: Any, diff: Path) -> None:
    weights = model.state_dict()
    missing = set(weights)
    for name, difference in _tensors(diff):
        if name.endswith(_DERIVED):
            continue
        if name not in weights or weights[name].shape != difference.shape:
            shape = tuple(weights[name].shape) if name in weights else "nothing"
            raise UserError(f"{diff}: {name} of {tuple(difference.shape)} is to be added to {shape}: another model?")
        if name in missing:
            weights[name].add_(difference)
            missing.discard(name)
    if missing:
        raise UserError(
            f"{diff}: has nothing to add to {sorted(missing)[0]}, and {len(missing) - 1} more: a file less?"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a folder, one file in memory at a time."""
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
            raise UserError(f"{file} is damaged ({' '.join(str(error).split())[:200]}): get it again") from error
        yield from tensors.items()
