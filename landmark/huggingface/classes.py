"""The classes of models and configurations with landmarks, one for each class of transformers.

They are made when they are first named: `LandmarkLlamaForCausalLM` from transformers' `LlamaForCausalLM`. So models
with landmarks can be pickled. `save_pretrained` copies this file to a saved model's folder, where AutoModelForCausalLM
finds it with trust_remote_code=True.
"""

from __future__ import annotations

from typing import Any

try:
    from landmark.huggingface.wrapping import class_named
except ImportError as error:
    raise ImportError("this model reads with landmarks: install the package `landmark` with its extra `hf`") from error


def __getattr__(name: str) -> Any:
    return class_named(name)
