"""Giving landmarks to a model of transformers, in place, and taking them off; and the classes of such models.

A model with landmarks has a class of its own, made of `LandmarkModel` and its class in transformers. In memory its
configuration keeps the model type of its family, by which other libraries know the model. In config.json the type
begins with `landmark_`, so that nothing opens the model without its landmarks by mistake.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from landmark.memory.blocks.scorer import scorer_of
from landmark.memory.blocks.scorers.landmarks import Landmarks
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.settings import MemorySettings
from landmark.models.gguf.file import is_gguf
from landmark.models.gguf.opening import is_quantised
from landmark.models.huggingface.attention import ATTENTION
from landmark.models.huggingface.families import FAMILIES, READ, check_model, rotation_of
from landmark.models.huggingface.folders import folder_of
from landmark.models.huggingface.model import SETTINGS, LandmarkModel, LandmarkSettings, prepare
from landmark.models.huggingface.safe_loading import check_folder, open_model, open_tokenizer, readable
from landmark.models.huggingface.tiny import tiny_model
from landmark.models.huggingface.trial import BLOCK, TOGETHER, check_reading
from landmark.utils.constants import DEFAULT_CHUNK, LANDMARK
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from landmark.utils.landmark_token import new_landmark
from landmark.utils.setting import check_field
from landmark.utils.weights import weights_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger(__name__)
BLOCK_SIZE = {"token": 63, "none": 32}  # with its landmark a block has 64 places
CHUNK = {"token": DEFAULT_CHUNK, "none": 2048}  # tokens read at a time
NAME = "Landmark"  # of a class: this, and the name of the class in transformers
WHERE = "landmark.models.huggingface.classes"
PREFIX = "landmark_"
_Base: Any = object  # see `config_class`


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int | None = None,
    memory: Mapping[str, Any] | None = None,
    local: int | None = None,
    landmarks: str = "token",
) -> LandmarkModel:
    """Make a decoder of transformers, quantised or not, a `LandmarkModel` too, in place, and return it.

    tokenizer: gets the token `<landmark>`, whose embedding is the mean of the others. landmarks: "token", one stands
    after each block, which the model must first learn to use; "none", blocks are found training-free by a summary of
    their keys. block_size: ℓ (None: 63, without landmarks 32). memory: settings of `MemorySettings`, as {"k": 4},
    without landmarks of `BlockCacheSettings`; others have their defaults. local: tokens of a prompt read at a time
    (None: 250, without landmarks 2048). Raises UserError for a model or settings that do not fit, and for a tokenizer
    with the token.
    """
    check_model(model, is_free=landmarks == "none")
    if memory is not None and not isinstance(memory, Mapping):
        raise UserError(f"memory={memory!r}: give settings by name, as {{'k': 4}}")
    if landmarks not in BLOCK_SIZE:
        raise UserError(f"landmarks={landmarks!r}: must be one of {', '.join(BLOCK_SIZE)}")
    block_size = BLOCK_SIZE[landmarks] if block_size is None else block_size
    local = CHUNK[landmarks] if local is None else local
    if landmarks == "none":
        return attach(model, without_landmarks(block_size, local, memory))
    if is_quantised(model):
        raise UserError(
            "the model's weights are integers of few bits, so no embedding can be added: expand those of a .gguf file, "
            "with landmark.models.huggingface.load(file, dtype=torch.float32), and unwrap that model; leave out bits"
        )
    if LANDMARK in tokenizer.get_vocab():
        raise UserError(
            f"the tokenizer has a token {LANDMARK} already: to go on with a model that was saved with landmarks, "
            "use landmark.models.huggingface.load(folder)"
        )
    if any(weight.is_meta for weight in embedding_weights(model)):
        raise UserError(
            "the model's embeddings are kept elsewhere (meta tensors), so none can be added: wrap the model on one "
            "device, save it, and open it with landmark.models.huggingface.load(folder, device_map=…)"
        )
    token = new_landmark(tokenizer)
    settings = LandmarkSettings(token, block_size, local, MemorySettings().updated(memory or {}))
    wrapped = attach(model, settings)
    tokenizer.add_tokens([LANDMARK], special_tokens=True)
    place_embedding(model, token)
    return wrapped


def use_landmarks(model: LandmarkModel, file: str | Path, gates: bool = False) -> LandmarkModel:
    """Let a model that reads without landmarks in its text choose blocks by those that it has learned, in place.

    file: of `task=teach`. gates: whether blocks also weigh as they say. Raises UserError for a file without landmarks,
    or with those of another model.
    """
    own = model.landmarks
    if own.token is not None:
        raise UserError(f"{type(model).__name__}: its text has landmarks already")
    scorer = {"name": "landmarks", "file": str(file)}
    size = Landmarks.load(file).block_size
    scorer_of(scorer).check_model(lambda: weights_digest(model), size)
    memory = own.memory.updated({"scorer": scorer, "gates": gates})
    setattr(model.config, SETTINGS, replace(own, block_size=size, memory=memory).saved())
    return model


def without_landmarks(
    block_size: int, local: int = CHUNK["none"], memory: Mapping[str, Any] | None = None
) -> LandmarkSettings:
    """The settings of a model that reads without landmarks, as of `wrap`. memory: of `BlockCacheSettings`."""
    return LandmarkSettings(None, block_size, local, BlockCacheSettings().updated(memory or {}))


def load(folder: str | Path, bits: int | None = None, **settings: Any) -> tuple[LandmarkModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer: one that was saved with landmarks, or any other, which then reads without them.
    folder: may be a .gguf file, or a name on the hub. bits: 4 or 8, of the linear layers of a folder (None: as they
    are). settings: of `from_pretrained`. Raises UserError if there is none.
    """
    path = folder_of(str(folder))
    check_folder(path)
    tokenizer, model = open_tokenizer(path), open_as_saved(path, bits, **settings)
    with readable(path, "model with a tokenizer"):
        return model if isinstance(model, LandmarkModel) else wrap(model, tokenizer, landmarks="none"), tokenizer


def open_as_saved(path: Path, bits: int | None = None, **settings: Any) -> LandmarkModel | PreTrainedModel:
    """A model as it was saved, with landmarks or as any other. Arguments and errors are those of `load`."""
    if not is_gguf(path):
        _register([str(read_json(path / "config.json", {"model_type": str})["model_type"]).removeprefix(PREFIX)])
    return open_model(path, bits, **settings)


def attach(model: PreTrainedModel, settings: LandmarkSettings) -> LandmarkModel:
    """Make a model whose vocabulary has the landmark a `LandmarkModel`, in place. Raises UserError if it cannot be."""
    check_model(model, is_free=settings.token is None)
    check_settings(settings)
    if (family := model.config.model_type) not in FAMILIES + READ:
        try_model(model)
        LOG.warning(f"{family}: not one of the listed families; a tiny model of it was tried, and read exactly")
    return _attached(model, settings)


def _attached(model: PreTrainedModel, settings: LandmarkSettings) -> LandmarkModel:
    rebound = _own_forward(model)
    base = type(model)
    _own_config(model)
    model.config.__class__ = config_class(type(model.config))
    model.__class__ = model_class(base)
    if rebound:
        cast(Any, model)._old_forward = MethodType(type(model).forward, model)
    prepare(model, settings)
    return cast(LandmarkModel, model)


def try_model(model: PreTrainedModel) -> None:
    """Raise UserError where a tiny model of the same class does not read through blocks as it would without them."""
    plain = tiny_model(model)
    cast(Any, plain).landmark_rotation = rotation_of(model)
    wrapped = _attached(copy.deepcopy(plain), without_landmarks(BLOCK, local=TOGETHER))
    if wrapped.config._attn_implementation not in ATTENTION.values():
        raise UserError(f"{plain.config.model_type}: its attention cannot be set")
    check_reading(plain, wrapped)


def _own_config(model: PreTrainedModel) -> None:
    """Give a model a copy of its configuration: the caller may make another model of it, which has no landmarks."""
    given, own = model.config, copy.deepcopy(model.config)
    copies = {id(given): own} | {
        id(part): getattr(own, name) for name in given.sub_configs if (part := getattr(given, name, None)) is not None
    }
    for module in model.modules():
        if (config := copies.get(id(getattr(module, "config", None)))) is not None:
            cast(Any, module).config = config


def unwrap(model: LandmarkModel) -> PreTrainedModel:
    """Take the landmarks off, in place; the embedding keeps `<landmark>`. Raises UserError for a model without them."""
    if not isinstance(model, LandmarkModel):
        raise UserError(f"{type(model).__name__} has no landmarks to take off")
    plain = cast(Any, model)
    rebound = _own_forward(plain)
    names = {name: original for original, name in ATTENTION.items()}
    plain.set_attn_implementation(names.get(plain.config._attn_implementation, plain.config._attn_implementation))
    delattr(plain.config, SETTINGS)
    vars(plain).pop("landmark_rotation", None)
    plain.config.__class__ = type(plain.config).__bases__[-1]
    plain.__class__ = type(plain).__bases__[-1]
    if rebound:
        plain._old_forward = MethodType(type(plain).forward, plain)
    return plain


def check_settings(settings: LandmarkSettings) -> None:
    """Raise UserError for settings out of range, of a wrong type, or unknown."""
    for item in fields(settings):
        if item.name != "memory":  # which checks itself
            check_field(item.name, getattr(settings, item.name), item)


def _own_forward(model: PreTrainedModel) -> bool:
    """Whether `forward` is accelerate's hook around that of the class. Raises UserError for any other of its own."""
    if "forward" not in vars(model):
        return False
    old = vars(model).get("_old_forward")
    if hasattr(model, "_hf_hook") and getattr(old, "__func__", None) is type(model).forward:
        return True
    raise UserError(
        f"{type(model).__name__}: this model has a forward of its own, as accelerator.prepare gives it: wrap it before"
    )


@torch.no_grad()
def place_embedding(model: PreTrainedModel, token: int) -> None:
    """Make room for a token and give it the mean embedding of the others."""
    rows = len(embedding_weights(model)[0])
    if token >= rows:
        before = [weight.data_ptr() for weight in embedding_weights(model)]
        model.resize_token_embeddings(token + 1, mean_resizing=False)
        _tell_hooks(model, before)
    for weight in embedding_weights(model):
        others = torch.arange(rows, device=weight.device) != token
        weight[token] = weight[:rows][others].mean(0)


def _tell_hooks(model: PreTrainedModel, before: list[int]) -> None:
    """Tell accelerate's hooks, which know shared weights by their place, that embeddings moved. before: that place."""
    moved = dict(zip(before, [weight.data_ptr() for weight in embedding_weights(model)], strict=True))
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            shared = getattr(one, "tied_params_map", None) or {}
            for place in [place for place in moved if place in shared]:
                shared[moved[place]] = shared.pop(place)


def embedding_weights(model: PreTrainedModel) -> list[Tensor]:
    """Weights of the input and of the output embedding; the same tensor if they are tied."""
    return [cast(Any, layer).weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())]


class _LandmarkConfig(_Base):
    """A configuration whose file has another model type."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict({**config_dict, "model_type": cast(Any, cls).model_type}, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        super().to_json_file(json_file_path, use_diff=use_diff)
        path = Path(json_file_path)
        write_json(path, {**read_json(path), "model_type": PREFIX + cast(Any, self).model_type})

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # the weights are named as those of the family


@cache
def config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The class of configurations with landmarks; `base` is that without them."""
    return cast(Any, type)(NAME + base.__name__, (_LandmarkConfig, base), {"__module__": WHERE})


@cache
def model_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of models with landmarks; `base` is that without them."""
    assert base.config_class is not None
    content = {"config_class": config_class(base.config_class), "__module__": WHERE}
    return type(NAME + base.__name__, (LandmarkModel, base), content)


def class_named(name: str) -> Any:
    """A class by its name. Raises AttributeError if transformers has none to make it from."""
    base = getattr(transformers, name.removeprefix(NAME), None) if name.startswith(NAME) else None
    if not isinstance(base, type):
        raise AttributeError(f"module {WHERE!r} has no attribute {name!r}")
    return config_class(base) if issubclass(base, PreTrainedConfig) else model_class(base)


def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM open folders of models with landmarks where this package is imported."""
    _register(FAMILIES)


def _register(families: Sequence[str]) -> None:
    for family in families:
        if (base := getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, ""), None)) is None:
            continue  # a type that `AutoModelForCausalLM` does not know, as of a model with code of its own
        config = config_class(base.config_class)
        CONFIG_MAPPING.register(PREFIX + family, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model_class(base), exist_ok=True)
