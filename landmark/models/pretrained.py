"""Decoders of transformers with the interface of our own decoder (`model.name`)."""

import dataclasses
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from landmark.attention.layout import insert_landmarks
from landmark.models import head_loss
from landmark.models.config import DecoderConfig, Landmarks
from landmark.models.gguf.file import is_gguf, opened
from landmark.models.gguf.opening import empty_model
from landmark.models.huggingface import LandmarkCache, LandmarkModel, LandmarkSettings, attach, place_embedding
from landmark.models.huggingface.chunked_forward import read_text
from landmark.models.huggingface.families import check_model, head_dim
from landmark.models.huggingface.folders import folder_of
from landmark.models.huggingface.safe_loading import check_folder, open_model, readable
from landmark.models.huggingface.wrapping import without_landmarks
from landmark.models.language_model import LanguageModel, summed_loss
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.errors import UserError
from landmark.utils.files import check_files, name_in_errors, read_json, sha256_file
from landmark.utils.window_batch import WindowBatch

if TYPE_CHECKING:
    from peft import PeftModel

transformers_logging.disable_progress_bar()  # the program has its own

PROJECTIONS = "all-linear"  # adapters are added to every linear layer but the head


class Pretrained(LanguageModel):
    """A causal language model of transformers: with landmarks if it is a `LandmarkModel`, else a plain transformer.

    tokenizer: the transformers tokenizer that is saved with the model (None: none is saved).
    """

    def __init__(self, model: "PreTrainedModel | PeftModel", tokenizer: Any = None):
        super().__init__()
        self.model: Any = model
        self.tokenizer = tokenizer
        self.config = _shape(self.bare)
        self._scales = False  # whether logits are known to be other than products with the head's weight

    @property
    def has_adapters(self) -> bool:
        """Whether the model is PEFT's, whose import takes seconds."""
        return hasattr(self.model, "get_base_model")

    @property
    def bare(self) -> Any:
        """The model of transformers, without the wrapper for adapters."""
        return self.model.get_base_model() if self.has_adapters else self.model

    def input_embeddings(self) -> nn.Embedding:
        return self.bare.get_input_embeddings()

    def new_memory(self, **settings) -> LandmarkCache | None:
        if isinstance(self.bare, LandmarkModel):
            return self.bare.new_memory(**settings)
        if settings:
            raise UserError(f"{', '.join(settings)}: a model without landmarks has no memory to set")
        return None

    def read_text(
        self, tokens: Tensor, memory: Any, kept: int = 1, most: int | None = None
    ) -> Iterator[tuple[int, Tensor | None]]:
        if memory is None:
            return super().read_text(tokens, memory, kept, most)
        if most is None and self.config.landmark_id is not None:
            most = DEFAULT_CHUNK
        return read_text(self.bare, tokens, memory, kept, None if most is None else lambda: most)

    def forward(self, tokens: Tensor, memory: Any = None, last: bool = False) -> Tensor:
        settings: dict[str, Any] = {"past_key_values": memory, "use_cache": memory is not None}
        if memory is None and self.config.landmark_id is not None:
            landmarks = self.bare.landmarks
            tokens, own = insert_landmarks(tokens, 0, landmarks.block_size, landmarks.token)
            phase = torch.zeros(len(tokens), dtype=torch.int64)
            return self.model(tokens, phase=phase, logits_to_keep=own[-1:] if last else own).logits
        if isinstance(memory, LandmarkCache) and self.config.landmark_id is not None:
            settings["local"] = tokens.shape[1]
        return self.model(tokens, logits_to_keep=int(last), **settings).logits

    def unlimited_memory(self, tokens: int) -> DynamicCache:
        return DynamicCache(config=self.bare.config)

    def window_losses(self, batch: WindowBatch) -> Iterator[tuple[Tensor, Tensor]]:
        settings = {} if batch.phase is None else {"phase": batch.phase}
        hidden = None
        if batch.targets.numel() * self.config.vocab_size > head_loss.AT_ONCE:
            hidden = self._before_head(input_ids=batch.tokens, use_cache=False, **settings)
        if hidden is None:
            logits = self.model(input_ids=batch.tokens, use_cache=False, **settings).logits
            yield summed_loss(logits, batch.targets, batch.weights)
        else:
            weight = self.bare.get_output_embeddings().weight
            yield head_loss.head_loss(hidden, weight, batch.targets, batch.weights)

    def _before_head(self, **windows: Any) -> Tensor | None:
        """Hidden states (B, T, D) whose products with the head's weight are the logits; None: they are not all."""
        head, seen = self.bare.get_output_embeddings(), []

        def keep_last(_: nn.Module, hidden: tuple[Tensor]) -> tuple[Tensor]:
            seen.append(hidden[0])
            return (hidden[0][:, -1:],)

        def products(_: nn.Module, hidden: tuple[Tensor], found: Tensor) -> None:
            seen.append(found)

        if type(head) is not nn.Linear or head.bias is not None or isinstance(head.weight, DTensor) or self._scales:
            return None
        hooks = (
            head.register_forward_pre_hook(keep_last),
            head.register_forward_hook(lambda *given: seen.append(given[2])),
        )
        try:
            logits = self.model(**windows).logits
        finally:
            for hook in hooks:
                hook.remove()
        hidden, head_output = seen
        self._scales = logits is not head_output  # it divides them, or caps them
        return None if self._scales else hidden

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> list[str]:
        """Merge adapters, and write the files of transformers, each whole or not at all, config.json last."""
        if self.has_adapters:
            self.model = self.model.merge_and_unload()
        partial = folder / ".weights.partial"
        shutil.rmtree(partial, ignore_errors=True)
        whole = {} if state is None else {"state_dict": {n.removeprefix("model."): x for n, x in state.items()}}
        with name_in_errors(folder):
            self.model.save_pretrained(partial, **whole)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(partial)
        files = sorted((file.name for file in partial.iterdir()), key=lambda name: name == "config.json")
        for name in files:
            os.replace(partial / name, folder / name)
        partial.rmdir()
        return files


@functools.cache
def size_of(name: str) -> tuple[int, int, DecoderConfig]:
    """Parameters of a model of transformers, with and without embeddings, and its shape. Loads no weights.

    name: its folder, or its name on the hub. Raises UserError where none is.
    """
    model = _without_weights(name)
    with readable(name, "model"):
        ends = {id(each.weight): each.weight for each in (model.get_input_embeddings(), model.get_output_embeddings())}
        total = sum(parameter.numel() for parameter in model.parameters())
        return total, total - sum(weight.numel() for weight in ends.values()), _shape(model)


@functools.cache
def check_landmarks(name: str) -> None:
    """Raise UserError where a model cannot have landmarks. name: its folder, or its name on the hub."""
    if not isinstance(model := _without_weights(name), LandmarkModel):
        check_model(model)


@functools.cache
def _without_weights(name: str) -> Any:
    check_folder(folder := folder_of(name))
    with readable(name, "model"), torch.device("meta"):
        if is_gguf(folder):
            return empty_model(folder, torch.float32)
        said = read_json(folder / "config.json", {"model_type": str}, "name the folder of a model")
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**said))


def start_from(name: str, shape: DecoderConfig, lora_rank: int | None = None, tokenizer: Any = None) -> Pretrained:
    """A trained model whose training is continued.

    name: its folder, or its name on the hub. shape: says whether and how the model gets landmarks. lora_rank: of the
    adapters, which are trained with the landmark's embedding (None: all weights are). tokenizer: of transformers, saved
    with the model. Raises UserError for a folder without a model, and for one that does not fit the shape.
    """
    model = open_model(folder_of(name), dtype=torch.float32, local_files_only=True)
    if shape.landmarks is not None:
        model = _with_landmarks(model, shape.landmarks)
    elif getattr(model.config, "landmark", None) is not None:
        raise UserError(f"{name} was trained with landmarks: start from it with model.kind=landmark")
    if lora_rank is None:
        return Pretrained(model, tokenizer)
    from peft import LoraConfig, get_peft_model

    embedding = next(n for n, layer in model.named_modules() if layer is model.get_input_embeddings())
    adapters = LoraConfig(
        r=lora_rank,
        lora_alpha=2 * lora_rank,
        target_modules=PROJECTIONS,
        trainable_token_indices={embedding: [shape.landmark_id]} if shape.landmark_id is not None else None,
    )
    return Pretrained(get_peft_model(model, adapters), tokenizer)


def _with_landmarks(model: PreTrainedModel, landmarks: Landmarks) -> LandmarkModel:
    token, block_size = landmarks.token, landmarks.block_size
    assert token is not None
    if getattr(model.config, "landmark", None) is None:
        wrapped = attach(model, LandmarkSettings(token, block_size, DEFAULT_CHUNK))
        place_embedding(model, token)
        return wrapped
    assert isinstance(model, LandmarkModel)
    if (model.landmarks.token, model.landmarks.block_size) != (token, block_size):
        raise UserError(
            f"model.block_size={block_size}: the model to start from has block_size="
            f"{model.landmarks.block_size} and the landmark {model.landmarks.token}, not {token}"
        )
    return model


def load_pretrained(
    folder: Path, expected: DecoderConfig | None = None, dtype: torch.dtype = torch.float32, bits: int | None = None
) -> Pretrained:
    """Load a model that `Pretrained.save` wrote, or one that gets no training, and reads without landmarks.

    bits: as of `open_model`. Raises UserError if it is damaged, or not of the `expected` shape.
    """
    model = open_model(folder, bits, dtype=dtype, local_files_only=True)
    saved = getattr(model.config, "landmark", None)
    if saved is None and expected is not None and expected.landmarks is not None and expected.landmark_id is None:
        model = attach(model, without_landmarks(expected.landmarks.block_size))
    loaded = Pretrained(model)
    for name in ("kind", "landmark_id", "block_size"):
        ours, theirs = getattr(expected or loaded.config, name), getattr(loaded.config, name)
        if ours != theirs:
            raise UserError(f"{folder} holds a model of another configuration: {name} is {theirs}, not {ours}")
    return loaded


def weights_sha256(name: str) -> str:
    """Hex SHA-256 of the content of a model's files, which does not depend on their folder."""
    if is_gguf(folder := folder_of(name)):
        return opened(folder).sha256
    check_files(folder)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if len(files) < 2 or not files[0].is_file():
        raise UserError(f"model.name={name}: {folder} holds no config.json with *.safetensors beside it")
    parts = [f"{file.name} {sha256_file(file)}" for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _shape(model: PreTrainedModel) -> DecoderConfig:
    """The configuration of a transformers model, as a `DecoderConfig`."""
    config = model.config
    shape = DecoderConfig(
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        head_dim=head_dim(config),
        mlp_dim=config.intermediate_size,
        num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
    )
    if not isinstance(model, LandmarkModel):
        return shape
    landmarks = Landmarks(model.landmarks.token, model.landmarks.block_size)
    return dataclasses.replace(shape, landmarks=landmarks)
