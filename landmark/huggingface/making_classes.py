"""Makes the classes of `landmark.huggingface.classes`, and registers them with AutoConfig and AutoModelForCausalLM.

In memory a configuration keeps the model type of its family, by which other libraries know the model. In config.json
the type begins with `landmark_`, so that nothing opens the model without its landmarks by mistake.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from landmark.huggingface.families import FAMILIES
from landmark.huggingface.model import LandmarkModel
from landmark.utils.files import read_json, write_json

NAME = "Landmark"
WHERE = "landmark.huggingface.classes"


PREFIX = "landmark_"
_Base: Any = object  # see `config_class`


class _LandmarkConfig(_Base):
    """What configurations of models with landmarks do differently: the model type in their file."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return super().from_dict({**config_dict, "model_type": cast(Any, cls).model_type}, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        super().to_json_file(json_file_path, use_diff=use_diff)
        path = Path(json_file_path)
        write_json(path, {**read_json(path), "model_type": PREFIX + cast(Any, self).model_type})

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # its weights are named as those of its family


@cache
def config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The class of the configurations of models with landmarks; `base` is that of models without them."""
    content = {"_auto_class": "AutoConfig", "__module__": WHERE}
    return cast(Any, type)(NAME + base.__name__, (_LandmarkConfig, base), content)


@cache
def model_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of the models with landmarks; `base` is that of models without them."""
    assert base.config_class is not None
    content = {
        "config_class": config_class(base.config_class),
        "_auto_class": "AutoModelForCausalLM",
        "__module__": WHERE,
    }
    return type(NAME + base.__name__, (LandmarkModel, base), content)


def class_named(name: str) -> Any:
    """A class by its name. Raises AttributeError if transformers has none to make it from."""
    base = getattr(transformers, name.removeprefix(NAME), None) if name.startswith(NAME) else None
    if not isinstance(base, type):
        raise AttributeError(f"module {WHERE!r} has no attribute {name!r}")
    return config_class(base) if issubclass(base, PreTrainedConfig) else model_class(base)


def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM open folders of models with landmarks."""
    for family in FAMILIES:
        base = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
        config = config_class(base.config_class)
        CONFIG_MAPPING.register(PREFIX + family, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model_class(base), exist_ok=True)
