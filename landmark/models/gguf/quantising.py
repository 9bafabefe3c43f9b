"""Weights of a folder as integers of four or eight bits, in the form that a .gguf file has them (`model.bits`)."""

from __future__ import annotations

import mmap
import tempfile
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from landmark.models.gguf.file import Mapped, Stored
from landmark.models.gguf.linear import GROUP, QuantizedLinear, is_packable
from landmark.utils.errors import UserError

BITS = {4: "Q4_1", 8: "Q8_0"}  # types with a scale for 32 weights; Q4_1 has a minimum too
SENSITIVE = "v_proj"  # has eight bits always, as the head has: there four bits cost most, and it is small
_AT_ONCE = 1 << 22  # weights that are quantised at a time
_RANGES, _FITS = (0.8, 0.9, 1.0, 1.1), 3  # parts of a group's range to begin with, and how often each is fitted


def four_bits(groups: Tensor) -> Tensor:
    """Blocks of Q4_1, (…, 20) bytes, of groups of 32 weights (…, 32) float32.

    Scale and minimum are fitted to the integers by least squares, and integers rounded anew, from several ranges; the
    best one is kept. It leaves a quarter less squared error than the range from the smallest to the largest weight.
    """
    low, high, mean = groups.amin(-1, True), groups.amax(-1, True), groups.mean(-1, True)
    least, best = torch.full_like(low, torch.inf), (groups, low, low)
    for part in _RANGES:
        scale, minimum, whole = (high - low) * part / 15, low * part, groups
        for _ in range(_FITS):
            whole = ((groups - minimum) / scale.clamp(min=1e-12)).round_().clamp_(0, 15)
            apart = whole - (middle := whole.mean(-1, True))
            scale = (apart * groups).sum(-1, True) / apart.square().sum(-1, True).clamp(min=1e-12)
            minimum = mean - scale * middle
        scale, minimum = scale.half().float(), minimum.half().float()
        error = (whole * scale + minimum - groups).square().sum(-1, True)
        best = tuple(torch.where(error < least, *pair) for pair in zip((whole, scale, minimum), best))
        least = least.minimum(error)
    whole, numbers = best[0].to(torch.uint8), torch.cat(best[1:], -1).half().view(torch.uint8)
    return torch.cat([numbers, whole[..., :16] | whole[..., 16:] << 4], -1)


def eight_bits(groups: Tensor) -> Tensor:
    """Blocks of Q8_0, (…, 34) bytes, of groups of 32 weights (…, 32) float32."""
    scale = groups.abs().amax(-1, True) / 127
    whole = (groups / scale.clamp(min=1e-12)).round().to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), whole.view(torch.uint8)], -1)


MAKERS = {"Q4_1": four_bits, "Q8_0": eight_bits}


class _Written(Mapped):
    """A file without a name, which is gone with the last model that has it."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path, self.map = path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __reduce__(self) -> Any:
        return _from_content, (bytes(self.map), self.path)


def _from_content(content: bytes, path: str) -> _Written:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return _Written(file, path)


def check_bits(bits: int, dtype: torch.dtype, device: str | torch.device) -> None:
    """Raise UserError where a model of this type on this device has no product of packed integers."""
    if not is_packable(device, dtype):
        raise UserError(
            f"model.bits={bits}: is for model.dtype=bfloat16 on a CPU with AVX2 or AVX-512; leave it out, or take a "
            ".gguf file, which is then expanded"
        )


def quantise(model: Any, bits: int, where: str) -> Any:
    """The model, whose linear layers have weights of so many bits, in place; embeddings and others stay as they are.

    The integers lie in a temporary file, and in memory packed for products. where: of the model, for messages.
    """
    head, tied = model.get_output_embeddings(), model.get_input_embeddings().weight
    layers = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    places: dict[str, tuple[str, int]] = {}
    with tempfile.TemporaryFile() as file:
        for name, layer in layers.items():
            if layer.in_features % GROUP:
                continue
            kind = BITS[8 if layer is head or name.endswith(SENSITIVE) else bits]
            places[name] = kind, file.tell()
            for rows in layer.weight.detach().split(max(1, _AT_ONCE // layer.in_features)):
                file.write(MAKERS[kind](rows.float().unflatten(1, (-1, GROUP))).numpy().tobytes())
            if layer.weight is not tied:
                layer.weight = nn.Parameter(torch.empty(layer.weight.shape, device="meta"), requires_grad=False)
        file.flush()
        written = _Written(file, where)
    for name, (kind, offset) in places.items():
        layer = layers[name]
        stored = Stored(written, f"{name}.weight", kind, (layer.out_features, layer.in_features), offset)
        model.set_submodule(name, QuantizedLinear(stored, layer.bias, None, is_tied=layer.weight is tied))
    return model
