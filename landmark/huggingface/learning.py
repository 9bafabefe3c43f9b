"""Learned landmarks learn from the model's own attention: which blocks it reads, where it reads all of them.

The model reads a text and its weights stay as they are. For a query i of a layer, p_b is the part of its attention that
goes to block b, and p_0 what goes to the last tokens and the first block, which are always read. Its landmarks say that
block b weighs ℓ·exp(q_i·k_lm(b)). The loss is the divergence of the parts that follow from these weights,

    KL(p ‖ p̂),  p̂_b ∝ ℓ exp(q_i·k_lm(b)),  p̂_0 ∝ p_0 Z,

with Z the sum of all exponentials in the model's own softmax: where it is 0, landmarks could be the paper's gates.
Others train what selects beside a model that stays, too: SeerAttention (Gao et al. 2024), the indexer of DeepSeek-V3.2.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from landmark.attention.scoring import capped
from landmark.huggingface.landmark_cache import LandmarkCache
from landmark.huggingface.learned import MODULES
from landmark.huggingface.model import LandmarkModel
from landmark.memory.question import Question
from landmark.memory.select import Choice
from landmark.memory.settings import LEARNED
from landmark.memory.store.tiers import DeviceBlocks
from landmark.memory.summaries import SummaryMemory
from landmark.utils.errors import UserError


class Teacher(SummaryMemory):
    """A memory that reads every block, and compares with their landmarks how it has weighed them.

    losses: of each layer and chunk that had blocks to choose from, (B,), nats, a sum over queries of means over heads.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.losses: list[Tensor] = []

    def read_and_merge(
        self, question: Question, choice: Choice, local: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        blocks, count = cast(DeviceBlocks, question.store.blocks), len(question.store)
        keys, values = blocks.keys[:, :, :count], blocks.values[:, :, :count]
        group = question.queries.q.shape[1] // keys.shape[1]
        q = question.exact[-1].transpose(1, 2)  # (B, H, T, d), in float32
        every = keys.to(q.dtype).repeat_interleave(group, 1)
        scores = capped(q @ every.flatten(2, 3).mT, question.softcap)
        gates = scores.unflatten(-1, (count, -1)).logsumexp(-1)
        whole = torch.cat([local[1][..., None].to(q.dtype), gates], -1).log_softmax(-1)
        out = local[0].to(q.dtype) * whole[..., :1].exp()
        blocks_out = scores.softmax(-1) @ values.to(q.dtype).repeat_interleave(group, 1).flatten(2, 3)
        out = out + blocks_out * -torch.expm1(whole[..., :1])
        if count > 1:
            total = local[1][..., None] - whole[..., :1]  # log Z
            with torch.enable_grad():
                self.losses.append(self._loss(question, q, keys, whole, total))
        return out.to(local[0].dtype), whole[..., 1:].exp()

    def _loss(self, question: Question, q: Tensor, keys: Tensor, whole: Tensor, total: Tensor) -> Tensor:
        """The divergence in a layer, (B,). whole: (B, H, T, 1 + n), log p, what is local first. total: log Z."""
        make = self.select.innermost.summaries(question.layer, self.keys)["learned"]
        landmarks = make(F.pad(keys, (0, 0, 0, 1)), 0)
        scores = capped(q @ landmarks.repeat_interleave(q.shape[1] // keys.shape[1], 1).mT, question.softcap)
        read = torch.logaddexp(whole[..., :1], whole[..., 1:2])
        said = torch.cat([read, scores[..., 1:] + math.log(self.block_size) - total], -1).log_softmax(-1)
        parts = torch.cat([read, whole[..., 2:]], -1)
        return (parts.exp() * (parts - said)).sum(-1).mean(1).sum(-1)


class OwnQueries(SummaryMemory):
    """A memory that notes what a model's queries are in the mean.

    means: of each layer (H, d), not rotated, times the scale of scores.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.means: dict[int, Tensor] = {}

    def attend_to_pending(self, question: Question, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        queries = question.queries
        self.means[question.layer] = queries.q.mean((0, 2)) * queries.scale
        return super().attend_to_pending(question, k, v)


def landmark_loss(model: LandmarkModel, ids: Tensor) -> Tensor:
    """How far the model's learned landmarks are from its own attention: nats a token, a mean over layers and heads.

    The loss has a gradient for the landmarks alone: `model.learned_landmarks` are what an optimizer gets. Before the
    first gradient their queries become the mean of the model's own in this text, over all processes of a group.

    Args:
        model: of `wrap` with landmarks="learned".
        ids: (B, T), a text as the model expects it, with the token that begins one.

    Raises UserError for a model without learned landmarks, for a text beyond the positions of the model's training, and
    for one so short that there is nothing to choose.
    """
    if not isinstance(model, LandmarkModel) or not model.landmarks.learned:
        raise UserError(f"{type(model).__name__} has no landmarks that learn: wrap it with landmarks='learned'")
    plain = cast(Any, model)
    settings = model.landmarks
    local = max(settings.local, settings.memory["window"])  # larger chunks are read faster
    most, least = plain.config.get_text_config(decoder=True).max_position_embeddings, settings.memory["window"]
    if ids.shape[1] > most:
        raise UserError(f"a text of {ids.shape[1]:,} tokens: the model was trained on {most:,} positions")
    if torch.is_grad_enabled():
        _begin(model, ids[:, :local])
    memory = {**LEARNED, "window": least, "k": ids.shape[1], "mapping": "true"}
    teacher = cast(Teacher, _read(model, ids, Teacher, local, memory))
    if not teacher.losses:
        raise UserError(
            f"a text of {ids.shape[1]:,} tokens, of which the last {least} are always read, leaves nothing to choose: "
            f"give it {least + 2 * settings.block_size + local} or more"
        )
    layers = len(getattr(plain, MODULES))
    return torch.stack(teacher.losses).sum() / (layers * ids.numel())


def _begin(model: LandmarkModel, ids: Tensor) -> None:
    """Let the queries of landmarks that have not learned anything yet be the mean of the model's own in a text."""
    modules = {int(layer): module for layer, module in getattr(model, MODULES).items()}
    if any(bool(module.queries.any()) for module in modules.values()):
        return
    settings = {**LEARNED, "window": ids.shape[1], "mapping": "stingy"}  # in which queries are not rotated
    means = cast(OwnQueries, _read(model, ids, OwnQueries, ids.shape[1], settings)).means
    for layer, module in modules.items():
        mean = means[layer]
        if distributed.is_initialized():
            distributed.all_reduce(mean)
            mean /= distributed.get_world_size()
        with torch.no_grad():
            module.queries.copy_(mean.view_as(module.queries))


def _read(
    model: LandmarkModel, ids: Tensor, kind: type[SummaryMemory], local: int, settings: dict[str, Any]
) -> SummaryMemory:
    """The memory of this kind after the model has read a text, without a gradient, in chunks of `local` tokens."""
    plain = cast(Any, model)
    cache = LandmarkCache(plain, model.landmarks.block_size, landmarks=False, kind=kind, **settings)
    was_training = plain.training
    plain.eval()
    try:
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1, local=local)
    finally:
        plain.train(was_training)
    return cast(SummaryMemory, cache.memory)
