"""A landmark decoder whose landmarks are in groups that have gates too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from landmark.attention import ContextMiss, Given, landmark_attention
from landmark.attention.inputs import as_autocast, without_autocast
from landmark.extensions.hierarchy import check_memory, check_model
from landmark.extensions.hierarchy.gates import Hierarchy, adjust, first_bias, landmark_scores
from landmark.extensions.hierarchy.selector import BestOfGroups
from landmark.memory.settings import MemorySettings
from landmark.models.config import DecoderConfig
from landmark.models.decoder import Block, Decoder, ReadWindow


class GroupBlock(Block):
    """Has a bias for the groups of each level, (levels, H_kv), log m at first; learned where landmarks have one."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        options, kv_heads = config.options, config.num_kv_heads or config.num_heads
        bias = first_bias(options["fan_out"], options.get("levels", 1), kv_heads)
        self.attention.register_parameter("group_bias", nn.Parameter(bias, requires_grad=config.keys.bias))


class Model(Decoder):
    """Options: `fan_out`, m, nodes of a group, and `levels` of groups, 1 if it is left out."""

    block = GroupBlock

    def __init__(self, config: DecoderConfig):
        """Raises UserError for a model that cannot have groups."""
        check_model(config.kind, config.alpha, config.backend, config.options)
        super().__init__(config)
        self.fan_out, self.levels = config.options["fan_out"], config.options.get("levels", 1)

    def group_bias(self, layer: int) -> Tensor:
        """The bias of a layer, (levels, H_kv)."""
        block = self.blocks[layer]
        assert isinstance(block, GroupBlock)
        return block.attention.get_parameter("group_bias")

    def attend_in_window(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: ReadWindow, extra: ContextMiss | None
    ) -> Tensor:
        """Attention of a layer over whole windows, with the adjusted scores of landmarks as gates.

        Args: as of `Decoder.attend_in_window`.
        """
        assert window.layout is not None
        q, k, v = as_autocast(q, k, v)
        block_size, phase = window.layout.block_size, window.layout.phase
        exact, phase = (
            torch.promote_types(q.dtype, torch.float32),
            q.new_zeros(len(q)).long() if phase is None else phase,
        )
        with without_autocast(q):
            wide = k.to(exact).repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores, own = landmark_scores(q.to(exact), wide, block_size, phase, 0, 1 / math.sqrt(q.shape[-1]))
            hierarchy = Hierarchy(self.fan_out, self.group_bias(layer)).for_heads(q.shape[1])
            gate = Given(adjust(scores, own, hierarchy)[0])
        settings = {"extra": extra, "top_k": window.top_k, "backend": self.config.backend}
        return landmark_attention(q, k, v, window.layout, gate=gate, **settings)[0]

    def memory_objects(self, settings: MemorySettings) -> dict[str, Any]:
        check_memory(settings)
        tied_layers = (0,) if self.keys.landmark == "token" else ()
        groups = {"fan_out": self.fan_out, "levels": self.levels, "bias": self.group_bias}
        return super().memory_objects(settings) | {"select": BestOfGroups(tied_layers=tied_layers, **groups)}
