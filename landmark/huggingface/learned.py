"""Learned landmarks of a model of transformers: where they are, and how they meet the keys that a memory stores."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from landmark.attention.keys import Keys
from landmark.attention.rotary import rotate
from landmark.huggingface.families import inverse_frequencies, landmark_layers, text_config
from landmark.huggingface.rotation import unrotate
from landmark.memory.learned_landmarks import LearnedLandmarks
from landmark.memory.store.block_store import Summary

MODULES = "learned_landmarks"  # the model's attribute, and so in its weights: of each layer with full attention


def add_modules(model: PreTrainedModel) -> None:
    """Give the model landmarks that have not learned anything yet."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    modules = nn.ModuleDict({str(layer): LearnedLandmarks(heads, dim) for layer in sorted(landmark_layers(model))})
    if model.device.type != "meta":  # where weights are filled later, or offloaded
        modules.to(model.device)
    model.add_module(MODULES, modules.to(model.dtype))


class LandmarksOfBlocks:
    """Makes the learned landmarks of stored blocks, as `landmark.memory.select.Learned` asks for them."""

    def __init__(self, model: PreTrainedModel, turning: Keys):
        """turning: how the model's keys are rotated."""
        self._modules = cast(Any, getattr(model, MODULES))
        self._frequencies, self._turning = inverse_frequencies(model), turning
        self.as_rotated = False  # whether blocks are stored as the model has rotated their keys, at their own places

    def __call__(self, layer: int) -> Summary:
        """Of a layer."""

        def landmarks(keys: Tensor, first: int) -> Tensor:
            module, tokens = self._modules[str(layer)], keys[..., :-1, :]
            if not self.as_rotated:
                return module(tokens)
            blocks, width = tokens.shape[2:4]
            starts = torch.arange(first, first + blocks, device=keys.device) * width
            turns = layer not in self._turning.unrotated_layers
            at = starts.repeat_interleave(width)[None] if turns else None
            found = module(unrotate(tokens.flatten(2, 3), at, self._frequencies).unflatten(2, (blocks, width)))
            if turns:
                found = rotate(found, self._turning.rotary(layer)(first * width, blocks * width, found)[::width])
            return _as_of_the_model(found, 2 * len(self._frequencies))

        return landmarks


def _as_of_the_model(x: Tensor, turning: int) -> Tensor:
    """The inverse of `unrotate` without a turn: of the first `turning` channels, i and i + turning/2 are a pair."""
    pairs, rest = x.split([turning, x.shape[-1] - turning], -1)
    return torch.cat([pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rest], -1)
