"""Models, new or trained. A trained one is config.json and model.safetensors; loading them runs no code of theirs."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from landmark.models.config import DecoderConfig, ModelConfig, decoder_config
from landmark.models.decoder import Decoder
from landmark.models.language_model import LanguageModel
from landmark.models.masked import MaskedDecoder
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import (
    HASHES,
    RETRAIN,
    open_written,
    read_hashes,
    read_json,
    write_atomic,
    write_hashes,
    write_json,
)
from landmark.utils.trust import load_from_module
from landmark.utils.weights import check_finite

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# Parts of the names of weights in the authors' public code, and ours.
_AUTHORS_NAMES = {
    "transformer.h.": "blocks.",
    "transformer.wte": "embedding",
    "transformer.ln_f": "norm",
    "rem_token_embedding": "cmt",
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp_in",
    "mlp.c_proj": "mlp_out",
}


def build(model: ModelConfig, tokenizer: Any, cmt: bool = False, start: str | None = None) -> LanguageModel:
    """A model to train.

    tokenizer: a transformers one is saved with the model. start: folder of a model whose training is continued, or of
    one of transformers its name on the hub (None: new weights). A landmark model can start from a plain one (Section
    4.2). Raises UserError where the model in `start` has another shape, or none is there.
    """
    config = decoder_config(model, tokenizer, cmt)
    if start is None:
        return new_decoder(config)
    if model.name is None:
        return _started_from(load(start), config, start).train()
    from landmark.models.pretrained import start_from

    return start_from(start, config, model.lora_rank, getattr(tokenizer, "inner", None))


def _started_from(model: LanguageModel, config: DecoderConfig, name: str) -> LanguageModel:
    """The model itself; or for a plain one that is to get landmarks, a landmark model with its weights.

    The landmark's embedding is then the mean of the others. Keys and biases of landmarks begin as in a new model, so
    that landmark attention is close to the attention that the model has learned (`landmark.attention.keys`).
    """
    if model.config.kind != "transformer" or config.kind != "landmark":
        check_same(model.config, config, where=name)
        return model
    check_same(model.config, config.without_landmarks(), where=name)
    started = new_decoder(config)
    started.load_state_dict({**started.state_dict(), **model.state_dict()})
    embeddings = started.input_embeddings().weight
    with torch.no_grad():
        others = torch.arange(len(embeddings), device=embeddings.device) != config.landmark_id
        embeddings[config.landmark_id] = embeddings[others].mean(0)
    return started


def new_decoder(config: DecoderConfig) -> Decoder:
    """A decoder with new weights: the paper's, a masked one, or that of the module `config.architecture`
    (docs/add_a_model.md). Raises UserError where there is none."""
    if config.masked:
        return MaskedDecoder(config)
    if config.architecture is None:
        return Decoder(config)
    return load_from_module("landmark.models", config.architecture, "Model", key="model.architecture")(config)


def from_authors_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with our names, where some may have the names of the authors' code. The tied head is left out."""
    renamed = {}
    for name, tensor in weights.items():
        if name.startswith(("transformer.", "rem_token_embedding.")):
            for theirs, ours in _AUTHORS_NAMES.items():
                name = name.replace(theirs, ours)
        renamed[name] = tensor
    renamed.pop("lm_head.weight", None)
    return renamed


def save(
    model: LanguageModel, folder: Path | str, state: dict[str, Tensor] | None = None, beside: Iterable[str] = ()
) -> None:
    """Write a model's configuration and weights, each whole or not at all, and their hashes.

    state: all weights, if they are sharded over processes. beside: other files of the folder that get a hash.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HASHES).unlink(missing_ok=True)  # of other weights
    if isinstance(model, Decoder):
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in (state or model.state_dict()).items()}
        write_atomic(folder / WEIGHTS, save_tensors(weights, metadata={"format": "pt"}))
        write_json(folder / CONFIG, model.config.to_flat())
        files = [CONFIG, WEIGHTS]
    else:
        files = model.save(folder, state)
    write_hashes(folder, [*files, *(name for name in beside if (folder / name).is_file())])


def load(
    folder: Path | str,
    expected: DecoderConfig | None = None,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    bits: int | None = None,
) -> LanguageModel:
    """Load a model, in evaluation mode: ours, also with the authors' names of weights, or one of transformers.

    expected: the configuration that it must have, except its backend. dtype, bits: of the weights of a model of
    transformers. Raises UserError for a file that is missing or damaged, and for another configuration, naming the
    differences.
    """
    model = _load(Path(folder), expected, dtype, bits)
    check_finite(model, Path(folder))
    return model.to(device).eval()


def _load(folder: Path, expected: DecoderConfig | None, dtype: str, bits: int | None) -> LanguageModel:
    is_file = folder.suffix == ".gguf" and folder.is_file()
    if not is_file and not folder.is_dir():
        raise UserError(f"{folder} is no folder: name the folder of a finished run")
    if is_file or "model_type" in read_json(folder / CONFIG, {}, "name the folder of a finished run"):
        from landmark.models.pretrained import load_pretrained

        return load_pretrained(folder, expected, getattr(torch, dtype), bits)
    hashes = read_hashes(folder, (CONFIG, WEIGHTS))
    stored = read_json(folder / CONFIG)
    try:
        config = DecoderConfig.from_flat(stored)
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    except (AttributeError, TypeError) as error:  # it is no mapping; or a number is missing, or is none
        said = "not the configuration of a model, or of one of another version"
        raise UserError(f"{folder / CONFIG}: {said}") from error
    if expected is not None:
        check_same(config, expected, where=folder)
    try:
        with open_written(folder / WEIGHTS, RETRAIN, sha256=hashes[WEIGHTS], named=HASHES) as file:
            weights = load_tensors(file.read())
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is damaged ({error}): {RETRAIN}") from error
    model = new_decoder(config)
    try:
        model.load_state_dict(from_authors_names(weights))
    except RuntimeError as error:
        detail = in_one_line(error)
        raise UserError(f"{folder / WEIGHTS} does not fit {folder / CONFIG}: {detail}") from error
    return model


def check_same(stored: DecoderConfig, expected: DecoderConfig, where: Path | str) -> None:
    """Raise UserError, naming every field that differs, if two configurations differ in more than the backend."""
    ours, theirs = expected.to_flat(), stored.to_flat()
    different = [
        f"{name} is {theirs.get(name)}, not {ours.get(name)}"
        for name in ours | theirs
        if name != "backend" and ours.get(name) != theirs.get(name)
    ]
    if different:
        raise UserError(f"{where} holds a model of another configuration: {'; '.join(different)}")
