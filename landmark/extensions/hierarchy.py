"""A hierarchy of landmarks (the paper's future work): groups of m blocks have a gate too, and groups of m groups.

Symbols: m = `fan_out`; level 0 are the blocks, level l+1 the groups of m consecutive nodes of level l, counted from the
first block of the window. s⁰_b is the score of a block's landmark. A group's key is the mean of its m nodes' keys, and
has a bias of its level, at first log m. So

    s_G = mean of s_n over the nodes n of G, plus the bias,

and no token is added to the text. A group is *complete* for a query if the query's own block comes after it. The outer
softmax of a query is over the tokens of its own block and the largest complete nodes, those in no complete group. The
weight of a token is the product along its way: gate of the group × gate among the m nodes of the group × … × weight
among the tokens of the block. A block weighs as in one outer softmax over blocks with the *adjusted* score

    s'_b = s'_G + s_b − logsumexp over the nodes n of G of s_n,        s'_n = s_n for the largest complete nodes.

A query of a memory takes the k best groups of the highest level; of the nodes in them, and of those in no complete
group yet, the k best; and so on down to the blocks. All scores are computed with all weights in memory at once: the
numbers are those of the definition, and it is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.attention import ContextMiss, Extra, Window
from landmark.attention.layout import AttentionInputs, as_autocast, blocks_and_landmarks, check_phase, without_autocast
from landmark.attention.reference import landmark_attention_weights
from landmark.config import Config
from landmark.config.schema import memory_settings
from landmark.memory import Memory
from landmark.memory.layer import Question
from landmark.memory.reading import for_each_head, merge, read_blocks, rotated_for_local_attention
from landmark.memory.select.scores import best_ages, scores_of_blocks
from landmark.memory.settings import MemorySettings
from landmark.models.config import DecoderConfig
from landmark.models.decoder import Decoder, Layer, ReadWindow
from landmark.utils.errors import UserError
from landmark.utils.window_batch import most_blocks

SETTINGS = ("model.fan_out", "model.levels")
_FIXED = ("granularity", "scorer", "rerank", "first", "index", "max_blocks")  # of a memory, as by default


def check(config: Config) -> None:
    """Raise UserError for settings that do not fit groups of landmarks."""
    model = config.model
    options = {"fan_out": model.fan_out, "levels": model.levels}
    check_model(model.kind, model.alpha or 0.0, config.cmt.enabled, model.backend, options)
    check_memory(memory_settings(config))


def check_model(kind: str, alpha: float, cmt: bool, backend: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for groups of a wrong size, or in a model without landmarks or with other gates."""
    fan_out, levels = options.get("fan_out"), options.get("levels")
    if fan_out is None:
        raise UserError(f"model.levels={levels}: are levels of groups of landmarks, set model.fan_out")
    if fan_out < 2 or (levels is not None and levels < 1):
        raise UserError(f"model.fan_out={fan_out}, model.levels={levels}: must be at least 2 and 1")
    if kind != "landmark" or alpha or cmt or backend == "triton":
        raise UserError(
            f"model.fan_out={fan_out}: needs model=landmark, model.alpha=0, cmt=off and model.backend=auto, "
            f"not {kind}, {alpha}, {cmt} and {backend}"
        )


def check_memory(settings: MemorySettings) -> None:
    """Raise UserError for settings of a memory that cannot be searched through groups."""
    for name in _FIXED:
        if name in settings.saved():
            only = MemorySettings().shown(name)
            raise UserError(f"{settings.shown(name)}: with model.fan_out blocks are found by their groups, set {only}")


def phase_of(layout: Window, like: Tensor) -> Tensor:
    """Tokens missing from the first block of each window, (B,), on the device of queries (B, H, T, d)."""
    return check_phase(layout.phase, len(like), layout.block_size, like.device).to(like.device)


def landmark_scores(q: Tensor, k: Tensor, layout: Window, scale: float) -> tuple[Tensor, Tensor]:
    """Scores (B, H, T, blocks) of the landmarks, −∞ where not seen, and each query's own block (B, T). q: (B, H, T, d),
    k: (B, H, prefix + T, d), rotated. A first block without tokens is not seen.
    """
    length, block_size, phase = k.shape[2], layout.block_size, phase_of(layout, q)
    block = torch.arange(most_blocks(length, block_size), device=q.device)
    row = block * (block_size + 1) + block_size - phase[:, None]  # of each block's landmark
    keys = k.gather(2, row.clamp(0, length - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))
    own = blocks_and_landmarks(phase, length, block_size)[0][:, layout.prefix :]
    seen = (block < own[..., None]) & (row > 0)[:, None]
    scores = torch.einsum("bhtd,bhnd->bhtn", q, keys) * scale
    return scores.masked_fill(~seen[:, None], -torch.inf), own


def adjusted(scores: Tensor, own: Tensor, fan_out: int, bias: Tensor) -> list[Tensor]:
    """Adjusted scores of the nodes of each level, blocks first: s' above.

    scores: (B, H, T, n), of blocks, −∞ for those that a query does not see. own: (B or 1, T), the number of each
    query's own block. bias: (levels, H), added to the scores of each level's groups.
    """
    if len(bias) == 0:
        return [scores]
    nodes = F.pad(scores, (0, -scores.shape[-1] % fan_out), value=-torch.inf).unflatten(-1, (-1, fan_out))
    seen = nodes > -torch.inf
    complete = torch.arange(nodes.shape[-2], device=own.device) < (own // fan_out)[:, None, :, None]
    complete = complete & seen.any(-1)
    mean = nodes.masked_fill(~seen, 0.0).sum(-1) / seen.sum(-1).clamp(min=1)
    groups = torch.where(complete, mean + bias[0][:, None, None], -torch.inf)
    of_groups = adjusted(groups, own // fan_out, fan_out, bias[1:])
    total = nodes.masked_fill(~complete[..., None], 0.0).logsumexp(-1)  # finite, so that its gradient is
    inside = of_groups[0][..., None] + nodes - total[..., None]
    of_nodes = torch.where(complete[..., None], inside, nodes).flatten(-2)
    return [of_nodes[..., : scores.shape[-1]], *of_groups]


def attend_by_gates(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, layout: Window, scale: float, top_k: int | None = None
) -> tuple[Tensor, Tensor]:
    """Landmark attention (B, H, T, d) by gates (B, H, T, blocks) in place of landmarks' scores, and its log-sum-exp."""
    phase = phase_of(layout, q)
    block, is_landmark = blocks_and_landmarks(phase, k.shape[2], layout.block_size)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
    scores = torch.where(is_landmark[:, None, None], gates.gather(-1, block[:, None, None].expand_as(scores)), scores)
    inputs = AttentionInputs(q, k, v, None, phase, None, None, layout.block_size, layout.prefix, scale, top_k=top_k)
    weights, lse = landmark_attention_weights(scores, inputs)
    return weights @ v, lse


def exact_for_each_head(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Queries, and keys or values for each query head, in float32 or float64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return [q.to(dtype), *(for_each_head(x.to(dtype), q.shape[1]) for x in others)]


class GroupMemory(Memory):
    """A memory whose blocks are found, and weigh, by their groups. bias: of a layer, (levels, H_kv). It drops none."""

    def __init__(self, *sizes, fan_out: int, bias: Callable[[int], Tensor], tied_layers: Collection[int], **settings):
        self.fan_out, self.bias, self.tied_layers = fan_out, bias, tied_layers
        super().__init__(*sizes, **settings)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, extra: Extra | None = None) -> Tensor:
        """As `Memory.attend`, with the gates of the groups."""
        q, k, v = as_autocast(q, k, v)
        with torch.no_grad(), without_autocast(q):
            question, k, v = self._begin(layer, q, k, v)
            rotated, k = rotated_for_local_attention(question, k, self.keys)
            rotated, k, v = exact_for_each_head(rotated, k, v)
            layout, scale = Window(self.block_size, prefix=k.shape[2] - q.shape[2]), question.scale
            stored, blocks = self._stored_scores(question), len(question.store)
            scores, own = landmark_scores(rotated, k, layout, scale)
            bias = for_each_head(self.bias(layer).to(stored), q.shape[1])
            levels = adjusted(torch.cat([stored, scores], -1), own + blocks, self.fan_out, bias)
            out, lse = attend_by_gates(rotated, k, v, levels[0][..., blocks:], layout, scale)
            if self.k == 0 or blocks == 0:
                return self._done(question, out.to(q.dtype))
            best = self._best_blocks(levels, blocks)
            shift = (levels[0][..., :blocks] - stored).gather(-1, best)
            weighted, gates = read_blocks(question, blocks - best)
            out, weights = merge(question, (out, lse), (weighted, gates + shift))
            return self._done(question, out.to(q.dtype), blocks - best, weights.to(q.dtype))

    def _best_blocks(self, levels: Sequence[Tensor], blocks: int) -> Tensor:
        """The numbers (B, H, T, q) of the best stored blocks. levels: of `adjusted`, stored blocks and the chunk's."""
        chosen = torch.zeros_like(levels[0][..., :0], dtype=torch.bool)
        for level in reversed(range(len(levels))):  # among nodes in the groups chosen, and those in no complete group
            count, inside = blocks // self.fan_out**level, chosen.repeat_interleave(self.fan_out, -1)
            inside = F.pad(inside, (0, count - inside.shape[-1]), value=True)
            scores = levels[level][..., :count].masked_fill(~inside, -torch.inf)
            ages = torch.arange(count, 0, -1, device=scores.device)
            best = best_ages(scores, ages, min(self.k, count))
            chosen = torch.zeros_like(inside).scatter(-1, count - best, True)
        return chosen.nonzero()[:, -1].view(*chosen.shape[:3], -1)

    def _stored_scores(self, question: Question) -> Tensor:
        """Scores (B, H, T, n) of all stored blocks, the oldest first, at their positions of scoring."""
        store, q = question.store, question.q
        if len(store) == 0:
            return q.new_empty(*q.shape[:3], 0, dtype=torch.promote_types(q.dtype, torch.float32))
        is_tied = question.layer in self.tied_layers and 0 < question.lags.own < len(store)
        return scores_of_blocks(question, question.exact, store.landmarks, len(store) if is_tied else 0)[0]


class GroupLayer(Layer):
    """Has a bias for the groups of each level, (levels, H_kv), log m at first; learned where landmarks have one."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        shape = config.options.get("levels", 1), config.num_kv_heads or config.num_heads
        bias = torch.full(shape, math.log(config.options["fan_out"]))
        self.attention.register_parameter("group_bias", nn.Parameter(bias, requires_grad=config.keys.bias))


class Model(Decoder):
    """A landmark decoder with groups. Options: `fan_out`, m, and `levels` of groups, 1 if it is left out."""

    layer_type = GroupLayer

    def __init__(self, config: DecoderConfig):
        """Raises UserError for a model that cannot have groups."""
        check_model(config.kind, config.alpha, config.cmt, config.backend, config.options)
        super().__init__(config)
        self.fan_out: int = config.options["fan_out"]

    def group_bias(self, layer: int) -> Tensor:
        """The bias of a layer, (levels, H_kv)."""
        return self.blocks[layer].get_parameter("attention.group_bias")

    def attend_in_window(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: ReadWindow, extra: ContextMiss | None
    ) -> Tensor:
        """As `Decoder.attend_in_window`, with the gates of the groups."""
        assert window.layout is not None
        q, k, v = as_autocast(q, k, v)
        layout, scale, dtype = window.layout, 1 / math.sqrt(q.shape[-1]), q.dtype
        with without_autocast(q):
            bias = for_each_head(self.group_bias(layer), q.shape[1])
            q, k, v = exact_for_each_head(q, k, v)
            gates = adjusted(*landmark_scores(q, k, layout, scale), self.fan_out, bias)[0]
            return attend_by_gates(q, k, v, gates, layout, scale, window.top_k)[0].to(dtype)

    def memory_objects(self, settings: MemorySettings) -> dict[str, Any]:
        check_memory(settings)
        return super().memory_objects(settings)

    def new_memory(self, **settings) -> GroupMemory:
        """As `Decoder.new_memory`; raises UserError for a setting that a search through groups does not have."""
        usual = super().new_memory(**settings)
        assert isinstance(usual, Memory)
        groups = {"bias": self.group_bias, "tied_layers": (0,) if self.keys.landmark == "token" else ()}
        objects = {name: getattr(usual, name) for name in ("keys", "positions", "store", "backend", "observer")}
        memory = GroupMemory(usual.block_size, usual.k, fan_out=self.fan_out, **groups, **objects)
        memory.model = usual.model
        return memory
