"""One token of a wrapped model's text as a CUDA graph of all layers: a GPU reads it faster than Python launches it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from landmark.memory.graphs import Graphs
from landmark.memory.text_memory import TokenKernels
from landmark.memory.tiers import new_buffer
from landmark.models.huggingface.families import FAMILIES, ROUTED
from landmark.models.huggingface.landmark_cache import LandmarkCache


class NextToken:
    """Reads one token of each text with a model. A cache has one of its own: it keeps neither of the two."""

    def __init__(self, model: Any, device: torch.device):
        self.graphs = Graphs(device)
        self._modules, self._weights = ([ref(x) for x in each] for each in (model.modules(), model.parameters()))
        self._ids = self._positions = torch.empty(0, dtype=torch.int64)

    def can_replay(self) -> bool:
        """Whether nobody would notice that Python does not run: no hook, no dropout, no adapter to be switched."""
        modules = [get_module() for get_module in self._modules]
        hooked = any(x is None or x._forward_hooks or x._forward_pre_hooks or x.training for x in modules)
        hooked = hooked or any(hasattr(x, "adapter_layer_names") for x in modules)
        return not hooked and all(get_weight() is not None for get_weight in self._weights)

    def __deepcopy__(self, memo: Any) -> None:
        """A copied cache makes its own."""

    def read(self, kernels: TokenKernels, cache: LandmarkCache, ids: Tensor, forward: Callable[..., Any]) -> Tensor:
        """Logits (B, 1, vocabulary) after the tokens (B, 1). kernels: of the cache. forward: of the original model."""
        with cache.reading_chunk(ids, 1, ids.device) as positions:
            if len(self._ids) != len(ids):
                like = {"dtype": ids.dtype, "device": ids.device}
                self._ids, self._positions = new_buffer(*ids.shape, **like), new_buffer(*positions.shape, **like)
            self._ids.copy_(ids)
            self._positions.copy_(positions)
            static = self._ids, self._positions
            weights = [cast(Tensor, get_weight()) for get_weight in self._weights]
            fixed = *kernels.ready_for_token(), *(x.data_ptr() for x in (*static, *weights))

            def read() -> Tensor:
                given = {"past_key_values": cache, "use_cache": True, "landmarks": cache}
                return forward(input_ids=static[0], position_ids=static[1], **given).logits

            logits = self.graphs.run(read, fixed).clone()
            kernels.took_token()
            cache.took_token()
        return logits


def replaying(model: Any, cache: LandmarkCache, ids: Tensor) -> Callable[[Callable[..., Any]], Tensor] | None:
    """What reads this token of each text by a CUDA graph, as `NextToken.read`; None: Python must launch each operator.

    Not where layers have a window or a state, or experts; where layers are on several devices or
    quantised; where the batch is padded; and not the first tokens of a text.
    """
    memory, device = cache.memory, ids.device
    if cache.has_others or cache.padded or cache.get_seq_length() > memory.tokens_read:
        return None
    if (kernels := memory.token_kernels(device, cache.num_stored)) is None:
        return None
    placed = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(placed) > 1 or getattr(model, "hf_quantizer", None) is not None or torch.is_autocast_enabled(device.type):
        return None
    if model.config.model_type not in FAMILIES or model.config.model_type in ROUTED:
        return None
    if cache.next_token is None:
        cache.next_token = NextToken(model, device)
    return partial(cache.next_token.read, kernels, cache, ids) if cache.next_token.can_replay() else None
