"""Learned landmarks of a model of transformers: where they are, and how they meet the keys that a memory stores."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from landmark.attention.keys import Keys
from landmark.attention.rotary import rotate
from landmark.huggingface.families import head_dim, inverse_frequencies, landmark_layers, text_config
from landmark.huggingface.rotation import as_of_the_model, unrotate
from landmark.memory.learned_landmarks import LearnedLandmarks
from landmark.memory.store.block_store import Summary

MODULES = "learned_landmarks"  # the model's attribute, and so in its weights: of each layer with full attention


def add_modules(model: PreTrainedModel) -> None:
    """Give the model landmarks that have not learned anything yet."""
    config = text_config(model)
    heads = config.num_attention_heads
    shape = heads, getattr(config, "num_key_value_heads", None) or heads, head_dim(model)
    modules = nn.ModuleDict({str(layer): LearnedLandmarks(*shape) for layer in sorted(landmark_layers(model))})
    if model.device.type != "meta":  # where weights are filled later, or offloaded
        modules.to(model.device)
    model.add_module(MODULES, modules.to(model.dtype))


class LandmarksOfBlocks:
    """Makes the learned landmarks of stored blocks, as `landmark.memory.select.Learned` asks for them."""

    def __init__(self, model: PreTrainedModel, turning: Keys):
        """turning: how the model's keys are rotated."""
        self._modules = cast(Any, getattr(model, MODULES))
        self._frequencies, self._turning = inverse_frequencies(model), turning

    def __call__(self, layer: int, keys: Keys) -> Summary:
        """Of a layer. keys: the memory's; others than `turning`: it stores keys as the model has rotated them."""
        as_rotated = keys is not self._turning

        def landmarks(stored: Tensor, first: int) -> Tensor:
            module, tokens = self._modules[str(layer)], stored[..., :-1, :]
            if not as_rotated:
                return module(tokens)
            blocks, width = tokens.shape[2:4]
            starts = torch.arange(first, first + blocks, device=stored.device) * width
            turns = layer not in self._turning.unrotated_layers
            at = starts.repeat_interleave(width)[None] if turns else None
            found = module(unrotate(tokens.flatten(2, 3), at, self._frequencies).unflatten(2, (blocks, width)))
            if turns:
                found = rotate(found, self._turning.rotary(layer)(first * width, blocks * width, found)[::width])
            return as_of_the_model(found, len(self._frequencies))

        return landmarks
