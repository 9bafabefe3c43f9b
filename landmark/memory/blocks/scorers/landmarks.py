"""Landmarks learned from a frozen model: M vectors stand for a block, and say how much attention it gets.

With log-sum-exps as gates the paper's grouped softmax is the plain one (`landmark.memory.blocks.attention`). So a
landmark has one task: to say the log-sum-exp of the scores of its block's keys. It is learned from the model's own
attention (`landmark.models.huggingface.teaching`). The text has no landmarks, and the model's weights stay.

In each layer, for each head of keys, with learned numbers:

1. *Features* of a token: its key without its position, and its value.
2. *Pool*: of each of the M vectors a softmax over the block's tokens, of features and of places in the block.
3. *Vector*: the pooled keys, plus a map of the pooled features, which stands in the middle of the places; and a bias.
4. *Score*: the log-sum-exp over the M vectors of a query's scaled scores plus biases, plus a level of each head.

Before anything is learned the vectors are nearly the means of M parts of the block, and the level is log(ℓ/M).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from landmark.attention.scoring import capped
from landmark.memory.blocks.cache import rotate_by
from landmark.memory.blocks.scorer import BlockScorer, Rotation
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.files import open_written, write_atomic

OUTSIDE = -4.0  # what a token of another part of the block has, before anything is learned
ABOUT, SEAL = "about", "sha256"
MADE_BY = "task=teach model.landmarks=FILE makes one"


@dataclass(frozen=True)
class Scorer(BlockScorer):
    """Those of a file (`Landmarks.save`)."""

    file: str

    def in_layer(self, layer: int) -> BlockScorer:
        layers = Landmarks.load(self.file).layers
        if layer not in layers:
            raise UserError(f"model.landmarks={self.file}: has no landmarks of layer {layer}, only of {sorted(layers)}")
        return layers[layer]

    def check_model(self, digest: Callable[[], str | None], block_size: int) -> None:
        found = Landmarks.load(self.file)
        if found.block_size != block_size:
            raise UserError(
                f"model.landmarks={self.file}: stand for blocks of {found.block_size} tokens: set model.block_size="
                f"{found.block_size}"
            )
        if found.model != digest():
            raise UserError(
                f"model.landmarks={self.file}: were learned from another model: the weights, model.dtype, model.bits "
                "and adapters must be the same"
            )


@dataclass(frozen=True, eq=False)
class LayerLandmarks(BlockScorer):
    """Landmarks of one layer with H_kv heads of keys, of d numbers; each has G query heads.

    weights: pool (H_kv, M, 2d), place (H_kv, M, ℓ), map (H_kv, 2d, d), bias (H_kv, 2d), scale and level (H_kv, G).
    sizes: (2,), of keys and of values, by which features are divided. frequencies: (r/2,), radians per position of each
    pair that the model rotates. Summaries are (C, n, M, d + 1): a vector and its bias.
    """

    weights: Mapping[str, Tensor]
    sizes: Tensor
    frequencies: Tensor

    def summarise(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        weights, (count, size) = self._on(keys), keys.shape[1:3]
        keys, values = (x.to(weights["pool"].dtype) for x in (keys, values))
        start = torch.arange(first, first + count, device=keys.device)[:, None] * size
        places = torch.arange(size, device=keys.device)
        content = rotate_by(self.frequencies, keys[..., None, :], -(start + places))[..., 0, :]
        sizes = self.sizes.to(keys)
        features = torch.cat([content / sizes[0], values / sizes[1]], -1)
        heads = len(weights["pool"])
        features, keys = (x.unflatten(0, (-1, heads)) for x in (features, keys))  # (B, H_kv, n, ℓ, …)
        chosen = torch.einsum("bhnlf,hmf->bhnml", features, weights["pool"]) + weights["place"][:, None]
        shares = chosen.softmax(-1)
        pooled, vectors = shares @ features, shares @ keys
        own = torch.einsum("bhnmf,hfd->bhnmd", pooled, weights["map"]).flatten(0, 1)
        part = size / shares.shape[-2]
        middle = ((torch.arange(shares.shape[-2], device=keys.device) + 0.5) * part).long()
        own = rotate_by(self.frequencies, own[..., None, :], start + middle)[..., 0, :]
        bias = torch.einsum("bhnmf,hf->bhnm", pooled, weights["bias"]).flatten(0, 1)
        return torch.cat([vectors.flatten(0, 1) + own, bias[..., None]], -1)

    def score(self, queries: Tensor, summaries: Tensor, softcap: float | None) -> Tensor:
        weights, between = self._on(queries), queries.shape[1:-3]
        heads = len(weights["pool"])
        queries = queries.flatten(1, -4) if between else queries[:, None]  # (C, m, G, τ, d)
        queries, summaries = (x.unflatten(0, (-1, heads)) for x in (queries, summaries))
        queries = queries * weights["scale"][:, None, :, None, None]
        vectors, biases = summaries[..., :-1], summaries[..., -1]
        rows = queries.flatten(2, -2)  # (B, H_kv, m·G·τ, d)
        products = capped(rows @ vectors.flatten(2, 3).mT, softcap).unflatten(-1, biases.shape[2:])
        scores = (products + biases[:, :, None]).logsumexp(-1).unflatten(2, queries.shape[2:-1])
        scores = (scores + weights["level"][:, None, :, None, None]).flatten(0, 1)
        return scores.unflatten(1, between) if between else scores[:, 0]

    def moved(self, summaries: Tensor, rotation: Rotation, distances: Tensor) -> Tensor:
        return torch.cat([rotation(summaries[..., :-1], distances), summaries[..., -1:]], -1)

    def _on(self, like: Tensor) -> Mapping[str, Tensor]:
        """The weights on a tensor's device; of a float64 text in its type."""
        kept = self.weights["pool"]
        if kept.device == like.device and (like.dtype != torch.float64 or kept.dtype == like.dtype):
            return self.weights
        dtype = torch.float64 if like.dtype == torch.float64 else kept.dtype
        return {name: x.to(like.device, dtype) for name, x in self.weights.items()}


@dataclass(frozen=True, eq=False)
class Landmarks:
    """Landmarks of all layers with full attention. model: identity of the weights that they were learned from. taught:
    how, in words of settings.
    """

    block_size: int
    model: str | None
    layers: Mapping[int, LayerLandmarks]
    taught: Mapping[str, Any]

    @classmethod
    def new(
        cls,
        block_size: int,
        vectors: int,
        model: str | None,
        layers: Mapping[int, tuple[int, int, int, Tensor, Tensor]],
    ) -> Landmarks:
        """Landmarks that have learned nothing. layers: by number H_kv, G, d, sizes, frequencies.

        Raises UserError where a block has fewer tokens than vectors.
        """
        if not 1 <= vectors <= block_size:
            raise UserError(f"teach.vectors={vectors}: must be from 1 to model.block_size={block_size}")
        part = (torch.arange(block_size) * vectors).div(block_size, rounding_mode="floor")
        place = torch.where(part == torch.arange(vectors)[:, None], 0.0, OUTSIDE)
        made = {}
        for number, (heads, group, dim, sizes, frequencies) in layers.items():
            weights = {
                "pool": torch.zeros(heads, vectors, 2 * dim),
                "place": place.repeat(heads, 1, 1),
                "map": torch.zeros(heads, 2 * dim, dim),
                "bias": torch.zeros(heads, 2 * dim),
                "scale": torch.ones(heads, group),
                "level": torch.full((heads, group), math.log(block_size / vectors)),
            }
            made[number] = LayerLandmarks(weights, sizes, frequencies.clone())
        return cls(block_size, model, made, {})

    def tensors(self) -> dict[str, Tensor]:
        """All that is learned, by name."""
        return {f"{n}.{name}": x for n, layer in self.layers.items() for name, x in layer.weights.items()}

    def named(self) -> dict[str, Tensor]:
        """All that the layers hold, by name, for `layers_of`."""
        given = {f"{n}.{name}": getattr(layer, name) for n, layer in self.layers.items() for name in _GIVEN}
        return self.tensors() | given

    def save(self, file: Path | str) -> None:
        """Write a file of safetensors, whole or not at all."""
        said = {"block_size": self.block_size, "model": self.model, "taught": dict(self.taught)}
        write_tensors(file, self.named(), {"landmarks": json.dumps(said)})

    @staticmethod
    def load(file: Path | str) -> Landmarks:
        """Raises UserError for a file that is missing or holds no landmarks."""
        if not Path(file).is_file():
            raise UserError(f"model.landmarks={file}: there is no such file, {MADE_BY}")
        return _loaded(str(file), Path(file).stat().st_mtime_ns)


_GIVEN = ("sizes", "frequencies")


def layers_of(named: Mapping[str, Tensor]) -> dict[int, LayerLandmarks]:
    """The layers of `Landmarks.named`, by number."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, x in named.items():
        number, _, kind = name.partition(".")
        found.setdefault(int(number), {})[kind] = x
    return {n: LayerLandmarks(x, *(x.pop(name) for name in _GIVEN)) for n, x in sorted(found.items())}


@lru_cache(maxsize=4)
def _loaded(file: str, _: int) -> Landmarks:
    try:
        tensors, about = read_tensors(file)
        said = json.loads(about["landmarks"])
        return Landmarks(said["block_size"], said["model"], layers_of(tensors), said["taught"])
    except (LookupError, ValueError) as error:
        raise UserError(f"model.landmarks={file}: holds no landmarks ({error}), {MADE_BY}") from error


def write_tensors(file: Path | str, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors, and texts about them, to a file of safetensors that `read_tensors` knows to be whole. The same
    content has the same bytes, so the texts are one: safetensors writes several in any order.
    """
    own = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    write_atomic(file, save_tensors(own, {ABOUT: json.dumps({**about, SEAL: _seal(own, about)})}))


def read_tensors(file: Path | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, and the texts about them, that `write_tensors` wrote. Raises ValueError for a file that is another."""
    try:
        open_written(file).close()
        with safe_open(file, "pt") as opened:
            about = dict(json.loads((opened.metadata() or {})[ABOUT]))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, UserError, KeyError) as error:
        raise ValueError(f"it is missing or damaged: {in_one_line(error)}") from error
    if about.pop(SEAL, None) != _seal(tensors, about):
        raise ValueError("it was altered: its SHA-256 is another")
    return tensors, about


def _seal(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {[*x.shape]}".encode())
        digest.update(x.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
