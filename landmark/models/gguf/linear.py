"""Layers whose weights stay the integers of a file.

A few rows (a token) take torch's product of packed integers of four bits. Many (a chunk of a prompt) take a product of
bfloat16 with the matrix that is expanded for them, a part at a time, into a buffer that all layers share.

The packed product knows y = Σ (q - 8) · scale + zero, with q of four bits and a scale for 32 columns. Integers of more
bits are v = 16 · h + l, two such columns: for the first one x is multiplied by 16, and both have one scale, or zero of
the second takes what is left. So integers are kept as they are, and scales are rounded to bfloat16.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landmark.models.gguf.file import Stored
from landmark.models.gguf.types import KINDS, dequantised, integers
from landmark.utils.errors import UserError

GROUP = 32  # columns with one scale, the fewest that the product takes
FEW = 64  # columns of four bits times rows of x, up to which the packed product is faster
BUFFER = 1 << 25  # most weights that are expanded at a time
_SLAB = 1 << 20  # numbers that are packed at a time: a third less time than for four times as many
_TILES = {"AVX512": 64, "AVX2": 32}  # rows of a matrix that the product keeps together
_PLACES = torch.tensor([[16.0], [1.0]], dtype=torch.bfloat16)  # what the high and the low half count
_kept = threading.local()  # the buffers of a thread, by name


@functools.cache
def tile_rows() -> int | None:
    """Rows of a tile of this processor's packed product; None: it has no fast one in the layout that is known here."""
    rows = _TILES.get(torch.backends.cpu.get_cpu_capability())
    if rows is None:
        return None
    columns = torch.arange(2 * rows * GROUP, dtype=torch.int32).view(2 * rows, GROUP) * 7 % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(columns, 1)
    ours = torch.empty(2, GROUP, rows // 2, dtype=torch.uint8)
    _tile(columns.to(torch.uint8), ours)
    return rows if torch.equal(packed.view(-1), ours.view(-1)) else None


def _tile(columns: Tensor, tiles: Tensor) -> None:
    """Write integers of four bits (R, C) uint8 as the product keeps them: (R / tile, …C, tile / 2)."""
    low, high = columns.view(len(tiles), 2, -1, columns.shape[1]).unbind(1)
    tiles.copy_((low | high << 4).transpose(1, 2).unflatten(1, tiles.shape[1:-1]))


def _buffer(name: str, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers that the thread keeps for the next caller."""
    kept = vars(_kept).get(name)
    if kept is None or len(kept) < count:
        with torch.inference_mode(False):
            kept = vars(_kept)[name] = torch.empty(count, dtype=dtype)
    return kept[:count]


class Packed(NamedTuple):
    """A matrix in the layout of the packed product. columns: (tiles, C, tile / 2) uint8, where C is K, or 2 K with the
    high and low halves of each `run` weights side by side. scales: (C / 32, rows, 2) bfloat16, with the zeros.
    """

    kind: str
    columns: Tensor
    scales: Tensor

    @property
    def planes(self) -> int:
        return KINDS[self.kind].planes

    @property
    def run(self) -> int:
        return KINDS[self.kind].group

    def product(self, x: Tensor) -> Tensor:
        """x (m, K) times the matrix, (m, rows), for few rows m."""
        if self.planes == 2:
            x = (x.unflatten(1, (-1, 1, self.run)) * _PLACES).flatten(1)
        packed = self.columns.view(self.scales.shape[1], -1)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, self.scales)

    def expanded_product(self, x: Tensor) -> Tensor:
        """x (m, K) times the matrix, (m, rows), for any m, each part of the matrix expanded once."""
        tiles, _, half = self.columns.shape
        y = x.new_empty(len(x), 2 * half * tiles)
        count = max(1, BUFFER // (2 * half * x.shape[1]))
        for start in range(0, tiles, count):
            part = self.expanded(start, min(tiles, start + count))
            torch.mm(x, part, out=y[:, 2 * half * start : 2 * half * start + part.shape[1]])
        return y

    def expanded(self, start: int, end: int) -> Tensor:
        """The transposed weights (K, rows) bfloat16 of some tiles, in the buffer that the next call overwrites."""
        tiles, half = self.columns[start:end], self.columns.shape[2]
        rows, weights = 2 * half * len(tiles), tiles.shape[1] // self.planes
        scales, zeros = self.scales[:, 2 * half * start : 2 * half * start + rows].unbind(2)
        if self.planes == 2 and self.run == GROUP:  # the first of each two groups has the high halves
            scales, zeros = scales[1::2], zeros[1::2]
        out = _buffer("weights", weights * rows, torch.bfloat16).view(weights, rows)
        step = max(GROUP, (1 << 20) // rows // GROUP * GROUP)
        for first in range(0, weights, step):
            last = min(weights, first + step)
            whole, piece = self._integers(tiles, first, last), out[first:last].view(-1, self.run, rows)
            out[first:last].copy_(whole)
            groups = slice(first // self.run, last // self.run)
            scale, zero = scales[groups, None].contiguous(), zeros[groups, None].contiguous()
            if KINDS[self.kind].centre:
                torch.addcmul(zero, piece, scale, out=piece)
            else:
                piece.mul_(scale)
        return out

    def _integers(self, tiles: Tensor, first: int, last: int) -> Tensor:
        """The integers (weights, rows) int8 of some columns, around 0, in a buffer."""
        out = _buffer("integers", (last - first) * tiles.shape[2] * 2 * len(tiles), torch.uint8)
        out = out.view(-1, self.run, len(tiles), 2, tiles.shape[2])
        if self.planes == 1:
            packed = tiles[:, first:last].unflatten(1, (-1, self.run)).permute(1, 2, 0, 3)
            torch.bitwise_and(packed, 15, out=out[..., 0, :])
            torch.bitwise_right_shift(packed, 4, out=out[..., 1, :])
            return out.view(last - first, -1).sub_(8).view(torch.int8)
        packed = tiles[:, 2 * first : 2 * last].unflatten(1, (-1, 2, self.run)).permute(1, 2, 3, 0, 4)
        high, low = packed.unbind(1)
        torch.add(low & 15, high & 15, alpha=16, out=out[..., 0, :])
        torch.add(low >> 4, high & 240, out=out[..., 1, :])
        return out.view(last - first, -1).sub_(128 + _rest(self.kind)).view(torch.int8)


def _rest(kind: str) -> int:
    """What v = 16 · h + l has to be less so that h and l, from -8 to 7, reach it. Only eight bits need more than 0."""
    return 0 if KINDS[kind].bits == 8 else 8


def packed(stored: Stored, order: Tensor | None = None) -> Packed:
    """The matrix of a file for the packed product. order: of its rows. Raises ValueError where there is no product."""
    tile = tile_rows()
    if tile is None:
        raise ValueError(f"{torch.backends.cpu.get_cpu_capability()} has no packed product")
    kind, blocks, (rows, weights) = KINDS[stored.kind], stored.rows(), (len(stored.rows()), stored.shape[-1])
    planes = kind.planes
    tiles = -(-rows // tile)
    columns = torch.empty(tiles, weights * planes, tile // 2, dtype=torch.uint8)
    scales = torch.zeros(weights * planes // GROUP, tiles * tile, 2, dtype=torch.bfloat16)
    step = max(tile, _SLAB // weights // tile * tile)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        some = blocks[first:last] if order is None else blocks[order[first:last]]
        whole, scale, zero = integers(stored.kind, some)
        if not (scale.isfinite().all() and (zero is None or zero.isfinite().all())):
            raise UserError(f"{stored.file.path}: tensor {stored.name} has scales that are not finite: get it again")
        zero = torch.zeros_like(scale) if zero is None else zero + scale * kind.centre
        whole = whole.view(torch.uint8).add_((8 if planes == 1 else 128 + _rest(stored.kind)) - kind.centre)
        if planes == 2 and kind.group == GROUP:
            zero = zero + scale * (8 - _rest(stored.kind))
            zero = torch.stack([torch.zeros_like(zero), zero], 2).flatten(1)
            scale = scale.repeat_interleave(2, 1)
        if missing := -len(whole) % tile:
            whole = F.pad(whole, (0, 0, 0, missing))
        into = columns[first // tile : -(-last // tile)].unflatten(1, (-1, planes, kind.group))
        for plane, four in enumerate([whole] if planes == 1 else [whole >> 4, whole & 15]):
            _tile(four, into[:, :, plane])
        scales[:, first:last, 0], scales[:, first:last, 1] = scale.T, zero.T
        stored.release()
    return Packed(stored.kind, columns, scales)


def expanded(stored: Stored, dtype: torch.dtype, order: Tensor | None = None) -> Tensor:
    """The weights of a tensor of a file, in its shape. order: of its rows."""
    blocks = stored.rows()
    out = torch.empty(len(blocks), stored.shape[-1], dtype=dtype)
    step = max(1, _SLAB // stored.shape[-1])
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step] if order is None else blocks[order[first : first + step]]
        out[first : first + step] = dequantised(stored.kind, some)
        stored.release()
    return out.view(stored.shape)


class Quantized(nn.Module):
    """A layer with the weights of a file. A saved model has the weights themselves, in bfloat16.

    order: of the weights' rows. is_tied: another layer has the same weights, so a saved model has them there.
    """

    def __init__(self, stored: Stored, order: Tensor | None = None, is_tied: bool = False) -> None:
        super().__init__()
        self.stored, self.order, self.is_tied = stored, order, is_tied
        self._numbers: Tensor | None = None

    def extra_repr(self) -> str:
        return f"{self.stored.shape}, kind={self.stored.kind}"

    def numbers(self, like: Tensor) -> Tensor:
        """The weights, expanded in the type and on the device of another tensor, and kept."""
        if self._numbers is None or (self._numbers.dtype, self._numbers.device) != (like.dtype, like.device):
            with torch.inference_mode(False):
                self._numbers = expanded(self.stored, like.dtype, self.order).to(like.device)
        return self._numbers

    def weight_digest(self) -> str:
        """Hex SHA-256 of the weights as the file has them."""
        return self.stored.digest()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and not self.is_tied:  # keep_vars asks for what is kept, and these are made anew
            destination[f"{prefix}weight"] = expanded(self.stored, torch.bfloat16, self.order)


class QuantizedLinear(Quantized):
    """A linear layer. Its weights are packed when the first token comes; on another device, or in another type than
    bfloat16, they are expanded then. Gradients of x flow, the weights get none.
    """

    def __init__(self, stored: Stored, bias: nn.Parameter | None, order: Tensor | None, is_tied: bool) -> None:
        super().__init__(stored, order, is_tied)
        self.out_features, self.in_features = stored.shape
        self.bias = bias
        self._packed: Packed | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not is_packable(x.device, x.dtype) or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.numbers(x), self.bias)
        if self._packed is None:
            with torch.inference_mode(False):
                self._packed = packed(self.stored, self.order)
        flat = x.reshape(-1, self.in_features)
        few = len(flat) * self._packed.planes <= FEW
        y = self._packed.product(flat) if few else self._packed.expanded_product(flat)
        y = y[:, : self.out_features].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class QuantizedExperts(nn.Module):
    """Gated experts with the weights of a file; those that routers chose are computed, each for all of its tokens.

    stored: `gate`, `up` (E, inner, D) and `down` (E, D, inner). act_fn: between them. As transformers' modules with
    `gate_up_proj` and `down_proj`, which a saved model has.
    """

    def __init__(self, stored: Mapping[str, Stored], act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.stored = stored["down"].shape[0], act_fn, stored
        self.gate, self.up, self.down = (
            nn.ModuleList(QuantizedLinear(stored[name].part(n), None, None, True) for n in range(self.num_experts))
            for name in ("gate", "up", "down")
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum (N, D) of the chosen experts of tokens (N, D), weighted. top_k_index, top_k_weights: (N, k)."""
        out = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            if number == self.num_experts:  # of a place without an expert
                continue
            rows, places = torch.where(top_k_index == number)
            x, (gate, up, down) = hidden_states[rows], (each[number] for each in (self.gate, self.up, self.down))
            y = down(self.act_fn(gate(x)) * up(x)) * top_k_weights[rows, places, None]
            out.index_add_(0, rows, y.to(out.dtype))
        return out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            gate, up, down = (expanded(self.stored[name], torch.bfloat16) for name in ("gate", "up", "down"))
            destination |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}


class QuantizedEmbedding(Quantized):
    """An embedding, of which the rows of the ids are read in the file, by a CPU. scale: what it multiplies them by."""

    def __init__(self, stored: Stored, dtype: torch.dtype, scale: Tensor | None) -> None:
        super().__init__(stored)
        self.num_embeddings, self.embedding_dim = stored.shape
        self.embed_scale: Tensor | None
        self.register_buffer("embed_scale", scale, persistent=False)
        self.like: Tensor
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)  # has the type and the device

    def forward(self, ids: Tensor) -> Tensor:
        if self.like.device.type == "cpu":
            out = dequantised(self.stored.kind, self.stored.rows()[ids.flatten()]).to(self.like).view(*ids.shape, -1)
        else:
            out = F.embedding(ids, self.numbers(self.like))
        return out if self.embed_scale is None else out * self.embed_scale.to(out.dtype)


def is_packable(device: torch.device | str, dtype: torch.dtype | None) -> bool:
    """Whether there is a packed product for this type of x on this device."""
    return torch.device(device).type == "cpu" and dtype == torch.bfloat16 and tile_rows() is not None


def bytes_by_form(model: nn.Module) -> dict[str, int]:
    """Bytes of a model's weights by the form that they have once each has been used."""
    forms = {"left in the file": 0, "of four bits": 0, "of twice four bits": 0, "expanded": 0}
    for layer in model.modules():
        if isinstance(layer, QuantizedEmbedding):
            forms["left in the file"] += layer.stored.size
        elif isinstance(layer, QuantizedLinear):
            planes = KINDS[layer.stored.kind].planes
            bits = planes * (4 + 2 * 16 / GROUP)  # with scale and zero
            forms["of twice four bits" if planes == 2 else "of four bits"] += int(layer.stored.count * bits / 8)
    forms["expanded"] = sum(parameter.nbytes for parameter in model.parameters())
    return {form: count for form, count in forms.items() if count}
