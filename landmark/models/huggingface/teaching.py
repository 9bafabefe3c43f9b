"""Learning landmarks from a frozen model: what it attends to in each window says how much each block must weigh.

For each window of text:

1. The model reads the window with all keys, as it was trained, without a gradient.
2. In each layer with full attention, queries at some places score all keys. So it is known how the model shares its
   attention between the tokens of a query's own block and the complete blocks before it.
3. Landmarks, made of the blocks' keys and values, give the same shares with their scores as gates.
4. The loss is the Kullback–Leibler divergence of these from those; only landmarks are learned, by AdamW.

Half of the windows repeat spans of their own, so that queries look back at what they copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from landmark.attention import Scoring, Sinks
from landmark.attention.scoring import capped
from landmark.memory.blocks.cache import BlockCache
from landmark.memory.blocks.scorers.landmarks import (
    Landmarks,
    LayerLandmarks,
    layers_of,
    read_tensors,
    write_tensors,
)
from landmark.memory.blocks.shares import InPlace
from landmark.models.huggingface.landmark_cache import LandmarkCache
from landmark.models.huggingface.model import LandmarkModel
from landmark.utils.errors import UserError
from landmark.utils.setting import setting
from landmark.utils.weights import weights_digest

BETAS, WARMUP, LEAST = (0.9, 0.99), 10, 0.05  # of AdamW; steps; the last learning rate, as a share of the largest
SPANS = (8, 16, 32, 64)  # tokens of a span that comes again
AGAIN, HALF, NUMBER = 0.5, 0.3, 0.15  # shares of spans that come again, of these by half, and that are numbers


@dataclass(frozen=True)
class TeachSettings:
    """How landmarks are learned. A step is one window."""

    steps: int = setting(160, least=1)
    length: int = setting(3072, least=2)  # tokens of a window
    vectors: int = setting(4, least=1)  # that stand for a block; the paper has one
    queries: int = setting(384, least=1)  # of a window, that ask
    max_lr: float = setting(2e-3, above=0)
    repeats: float = setting(0.5, least=0, most=1)  # share of windows with repeated spans and numbers


class Attended(InPlace):
    """A memory that reads as ever, and keeps the queries of some places."""

    def __init__(self, memory: BlockCache, places: Tensor):
        """places: (t,), positions of a text that is read at once."""
        super().__init__(memory)
        self._places = places
        # By layer: scaled queries (H, t, d), of it and of layers that read its keys.
        self.asked: dict[int, list[tuple[Tensor, Scoring, Sinks | None]]] = {}

    def attend_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """As of `BlockCache`."""
        queries = q[0][:, self._places.to(q.device)].float() * scoring.scale_of(q.shape[3])
        self.asked.setdefault(layer, []).append((queries, scoring, sinks))
        return self.memory.attend_in(layer, q, k, v, scoring, sinks)


class Asked(NamedTuple):
    """What queries (H, t, d) of a layer attend to, scaled, at places (t,) of the text. keys, values: (H_kv, T, d).
    scoring, sinks: of the layer.
    """

    queries: Tensor
    places: Tensor
    keys: Tensor
    values: Tensor
    scoring: Scoring
    sinks: Sinks | None


def loss_of(landmarks: LayerLandmarks, asked: Asked, size: int) -> Tensor:
    """KL(model ‖ landmarks) of a layer, nats, a mean over heads and queries: of the shares of attention that go to the
    tokens of a query's own block, and to each block before. size: ℓ, tokens of a block.
    """
    keys, heads, count = asked.keys, len(asked.keys), asked.keys.shape[1] // size
    rows = asked.queries.unflatten(0, (heads, -1))  # (H_kv, G, t, d)
    scores = capped(torch.einsum("hgtd,hsd->hgts", rows, keys), asked.scoring.softcap)
    at, own = torch.arange(keys.shape[1], device=keys.device), (asked.places // size)[:, None]
    is_local = (at // size == own) & (at <= asked.places[:, None])
    is_far = torch.arange(count, device=keys.device) < own
    local = scores.masked_fill(~is_local, -torch.inf).logsumexp(-1)
    if asked.sinks is not None:
        local = torch.logaddexp(local, asked.sinks.scores.to(local).view(heads, -1, 1))
    true = scores[..., : count * size].unflatten(-1, (count, size)).logsumexp(-1)
    blocks, values = (x[:, : count * size].unflatten(1, (count, size)) for x in (keys, asked.values))
    gates = landmarks.score(rows, landmarks.summarise(blocks, values, 0), asked.scoring.softcap)
    true, gates = (x.masked_fill(~is_far, -torch.inf) for x in (true, gates))
    total, gated = (torch.logaddexp(local, x.logsumexp(-1)) for x in (true, gates))
    shares = (true - total[..., None]).exp()
    return ((shares * torch.where(is_far, true - gates, 0.0)).sum(-1) + gated - total).mean()


class Teaching:
    """Landmarks that are being learned from a model, one window a step.

    model: reads without landmarks; its weights do not change. settings: see `TeachSettings`. Raises UserError for a
    window without a complete block before its end.
    """

    def __init__(self, model: LandmarkModel, settings: TeachSettings, seed: int = 0):
        self.model, self.settings, self.seed, self.step = model, settings, seed, 0
        self._size = model.landmarks.block_size
        if settings.length < 2 * self._size:
            raise UserError(f"teach.length={settings.length}: must be at least two blocks of {self._size}")
        self.landmarks: Landmarks | None = None  # after the first window, which says the sizes of keys and values
        self._optimizer: torch.optim.AdamW | None = None
        self._digest = weights_digest(cast(Any, model))

    def learn(self, ids: Sequence[int]) -> dict[int, float]:
        """One step on a window of ids. Returns the loss of each layer, nats."""
        losses = self.losses(ids, self.step)
        assert self._optimizer is not None
        self._optimizer.zero_grad()
        torch.stack([x.cpu() for x in losses.values()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        warm, done = (self.step + 1) / WARMUP, self.step / self.settings.steps
        share = min(1.0, warm) * (LEAST + (1 - LEAST) / 2 * (1 + math.cos(math.pi * done)))
        self._optimizer.param_groups[0]["lr"] = self.settings.max_lr * share
        self._optimizer.step()
        self.step += 1
        return {number: float(x.detach()) for number, x in losses.items()}

    @torch.no_grad()
    def validate(self, ids: Sequence[int]) -> dict[int, float]:
        """The loss of each layer on a window, nats, without learning from it."""
        return {number: float(x) for number, x in self.losses(ids, -1).items()}

    def losses(self, ids: Sequence[int], draw: int) -> dict[int, Tensor]:
        """The loss of each layer with full attention on a window, nats. draw: number that the places depend on."""
        size, length = self._size, len(ids)
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + draw + 1)
        places = size + torch.randperm(length - size, generator=generator)[: self.settings.queries].sort().values
        cache: LandmarkCache = self.model.new_memory(dense=length, mapping="true", scorer="mean_key", gates=False)
        attended = Attended(cast(BlockCache, cache.memory), places)
        cast(Any, cache).memory = attended
        with torch.no_grad():
            device = next(cast(Any, self.model).parameters()).device
            text = torch.tensor([[*ids]], device=device)
            cast(Any, self.model)(text, past_key_values=cache, logits_to_keep=1, local=length)
        kept = {n: (x.keys[:, :length].float(), x.values[:, :length].float()) for n, x in attended.layers.items()}
        if self.landmarks is None:
            self._begin(attended, kept, cache)
        assert self.landmarks is not None
        found = {}
        for number, (keys, values) in kept.items():
            own, at = self.landmarks.layers[number], places.to(keys.device)
            asked = [Asked(q, at, keys, values, scoring, sinks) for q, scoring, sinks in attended.asked[number]]
            found[number] = torch.stack([loss_of(own, each, size) for each in asked]).mean()
        return found

    def _begin(self, attended: Attended, kept: Mapping[int, tuple[Tensor, Tensor]], cache: LandmarkCache) -> None:
        """New landmarks, by the first window."""
        frequencies, layers = cache.frequencies, dict[int, Any]()
        for number, pair in kept.items():
            heads, _, dim = pair[0].shape
            turns = number not in attended.unrotated_layers
            sizes = torch.stack([x.square().mean().sqrt().cpu() for x in pair])
            own = frequencies.float().cpu() if turns else torch.zeros(0)
            layers[number] = heads, len(attended.asked[number][0][0]) // heads, dim, sizes, own
        self.landmarks = Landmarks.new(self._size, self.settings.vectors, self._digest, layers)
        self._optimise()

    def _optimise(self) -> None:
        assert self.landmarks is not None
        self._weights = [x.requires_grad_() for x in self.landmarks.tensors().values()]
        self._optimizer = torch.optim.AdamW(self._weights, self.settings.max_lr, betas=BETAS, weight_decay=0.0)

    @property
    def done(self) -> Landmarks:
        """The landmarks, with how they were learned."""
        assert self.landmarks is not None
        return replace(self.landmarks, taught={**asdict(self.settings), "seed": self.seed, "steps": self.step})

    def save_state(self, file: Path) -> None:
        """Write all from which a teaching goes on, whole or not at all."""
        assert self.landmarks is not None
        assert self._optimizer is not None
        tensors = {f"landmarks.{name}": x.detach() for name, x in self.landmarks.named().items()}
        for name, x in self.landmarks.tensors().items():
            tensors |= {f"{kind}.{name}": self._optimizer.state[x][kind] for kind in _MOMENTS}
        said = {**self._identity(), "step": str(self.step)}
        write_tensors(file, tensors, said)

    def load_state(self, file: Path) -> bool:
        """Go on from a file. Returns whether it is of this model and of these settings. Raises UserError where it is
        damaged.
        """
        try:
            kept, said = read_tensors(file)
        except ValueError as error:
            raise UserError(f"{file}: {error}: delete it, the teaching begins anew") from error
        if {key: said.get(key) for key in self._identity()} != self._identity():
            return False
        own = {name.removeprefix("landmarks."): x for name, x in kept.items() if name.startswith("landmarks.")}
        self.landmarks = Landmarks(self._size, said["model"], layers_of(own), {})
        self._optimise()
        assert self._optimizer is not None
        self.step = int(said["step"])
        for name, x in self.landmarks.tensors().items():
            self._optimizer.state[x] = {kind: kept[f"{kind}.{name}"] for kind in _MOMENTS}
        return True

    def _identity(self) -> dict[str, str]:
        settings = {name: str(value) for name, value in asdict(self.settings).items()}
        return {**settings, "seed": str(self.seed), "size": str(self._size), "model": self._digest}


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW


def window(
    tokens: np.ndarray,
    step: int,
    settings: TeachSettings,
    beginning: Sequence[int],
    encode: Callable[[str], Iterable[int]],
    seed: int = 0,
) -> list[int]:
    """The ids of a step's window: text as it is, or with repeated spans and numbers. A pure function of seed and step.

    tokens: raw ids of a split. beginning: ids that begin a text. encode: of numbers.
    """
    draw, length = np.random.default_rng([seed, step]), settings.length
    start = int(draw.integers(max(1, len(tokens) - length)))
    text = [*beginning, *tokens[start : start + length - len(beginning)].tolist()]
    if draw.random() >= settings.repeats:
        return text
    found = text[: len(beginning) or 1]
    while len(found) < length:
        source = found if draw.random() < AGAIN and len(found) > 4 * SPANS[-1] else text
        count = int(draw.choice(SPANS))
        at = int(draw.integers(1, max(2, len(source) - count)))
        count = count // 2 if source is found and draw.random() < HALF else count
        span = source[at : at + count]
        if draw.random() < NUMBER:
            span = encode(f" {draw.integers(10 ** int(draw.choice([3, 5, 7])))}")
        found = [*found, *span]
    return found[:length]
