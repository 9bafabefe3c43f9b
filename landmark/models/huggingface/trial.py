"""Trying a decoder before it is believed: whether a tiny model of it reads through blocks as by a plain computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from landmark.models.huggingface.attention import ORIGINALS
from landmark.models.huggingface.families import landmark_layers
from landmark.models.huggingface.tiny import NOT_TRIED, VOCABULARY, doubled
from landmark.utils.errors import UserError, in_one_line

BLOCK, LOCAL, BLOCKS, TOGETHER, TOKENS = 4, 8, 3, 16, 45
PARTS = [TOKENS], [27, 1, 1, TOKENS - 29]  # how the text is cut
EXACT = 1e-8  # of the largest logit: layers after another let roundings grow
DIFFERENT = 1e-5


def check_reading(plain: PreTrainedModel, wrapped: Any) -> None:
    """Raise UserError, with what differs, unless a model reads exactly through blocks, cut anywhere.

    plain: a tiny model. wrapped: a copy that reads without landmarks, in blocks of BLOCK. With all blocks it must be
    the plain model. With few it must be the plain model under a mask that shows each query the keys of the blocks that
    it would choose, and those before it.
    """
    family = plain.config.model_type
    ids = torch.randint(1, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with doubled():
        try:
            original, masked = _logits(plain, ids), _masked_logits(plain, ids)
            _compare(
                _in_two(plain, ids),
                original,
                f"{family}: with transformers' own cache, a tiny model that is cut in two",
            )
            for what, expected, settings in (
                ("all blocks", original, {"k": TOKENS, "window": 0, "mapping": "true"}),
                ("few blocks", masked, {"k": BLOCKS, "window": LOCAL, "dense": 0, "mapping": "true"}),
            ):
                for parts in PARTS:
                    memory = wrapped.new_memory(**settings)
                    found = [wrapped(part, past_key_values=memory).logits for part in ids.split(list(parts), 1)]
                    _compare(
                        torch.cat(found, 1), expected, f"{family}: a tiny model of it that reads {what}{_cut(parts)}"
                    )
        except UserError as error:
            if "attended without landmarks" in str(error):
                raise UserError(f"{family}: its layers hand on no arguments to their attention") from error
            raise error if str(error).startswith(f"{family}: ") else UserError(f"{family}: {error}") from error
        except Exception as error:
            if isinstance(error, IndexError) or "out of bounds" in str(error):
                raise UserError(f"{family}: reads no text that is longer than the positions of its settings") from error
            raise UserError(f"{family}: {NOT_TRIED}: {in_one_line(error)}") from error
    if float((masked - original).abs().max()) < DIFFERENT * float(original.abs().max()):
        raise UserError(f"{family}: a tiny model of it answers as if nothing depended on the blocks that it reads")


def _cut(parts: Sequence[int]) -> str:
    return f", cut into {len(parts)} parts," if len(parts) > 1 else ""


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def _in_two(model: PreTrainedModel, ids: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1])[None]
    first = model(ids[:, :TOGETHER], use_cache=True, position_ids=places[:, :TOGETHER])
    second = model(ids[:, TOGETHER:], past_key_values=first.past_key_values, position_ids=places[:, TOGETHER:])
    return torch.cat([first.logits, second.logits], 1)


def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < EXACT:
        raise UserError(f"{what} differs from what it must be by {error:.1g} of its largest logit")


def _masked_logits(plain: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of a model whose layers with full attention have a mask of the keys that a query reads."""
    layers, implementation = landmark_layers(plain), str(plain.config._attn_implementation)

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        if module.layer_idx in layers:
            read = _read(q, k, kwargs.get("scaling") or q.shape[-1] ** -0.5, kwargs.get("softcap"))
            attention_mask = torch.zeros(read.shape, dtype=q.dtype).masked_fill(~read, -torch.inf)
        return ORIGINALS[implementation](module, q, k, v, attention_mask, **kwargs)

    AttentionInterface.register("landmark_masked", attention)
    AttentionMaskInterface.register("landmark_masked", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    plain.set_attn_implementation("landmark_masked")
    try:
        return _logits(plain, ids)
    finally:
        plain.set_attn_implementation(implementation)


def _read(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The keys that each query reads, (1, H, T, T), bool. q: (1, H, T, d), k: (1, H_kv, T, d)."""
    read = torch.zeros(1, q.shape[1], q.shape[2], q.shape[2], dtype=torch.bool)
    group = q.shape[1] // k.shape[1]
    for head, at in torch.cartesian_prod(torch.arange(k.shape[1]), torch.arange(q.shape[2])).tolist():
        far = max(0, at // BLOCK * BLOCK - LOCAL) // BLOCK
        own = read[0, head * group : (head + 1) * group, at]
        own[:, far * BLOCK : at + 1] = True
        if far:
            scores = (
                q[0, head * group : (head + 1) * group, at]
                @ k[0, head, : far * BLOCK].unflatten(0, (far, BLOCK)).mean(1).T
            )
            scores = scores * scale if softcap is None else softcap * torch.tanh(scores * scale / softcap)
            shares = scores.softmax(-1).amax(0)
            shares[0] = torch.inf  # the first block is always read
            for block in shares.topk(min(BLOCKS, far)).indices.tolist():
                own[:, block * BLOCK : (block + 1) * BLOCK] = True
    return read
