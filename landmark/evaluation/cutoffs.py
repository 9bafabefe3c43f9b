"""A cutoff of the context miss token for each layer: lookups are dropped in the layers where this costs least.

The paper has one cutoff for all layers (Appendix D, Table 3). Here:

1. On the validation split the cutoff of one layer at a time is raised. This measures the share of lookups that the
   layer then drops, and the cost, which is the increase of the loss.
2. Of all combinations that drop enough lookups, the one with the lowest sum of costs is chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from landmark.data.stream import Stream
from landmark.data.tokenizer import Tokenizer
from landmark.evaluation.perplexity import evaluate
from landmark.models import Decoder
from landmark.utils.files import read_json, write_json

if TYPE_CHECKING:
    from landmark.config import Config

CUTOFFS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0)
TOKENS = 1 << 16  # of the validation split, for each measurement
STEPS = 1000  # shares of lookups are added up in parts of 1 / STEPS


@dataclass(frozen=True)
class CutoffEffect:
    """The effect of a cutoff in one layer: the share of the layer's lookups dropped, and the cost in nats per token."""

    cutoff: float
    dropped: float
    cost: float


Measure = Callable[[Sequence[float]], tuple[float, list[float]]]


def choose_cutoffs(
    model: Decoder,
    stream: Stream,
    tokenizer: Tokenizer,
    config: Config,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """A cutoff for each layer; together they drop the share of lookups that `cmt.cutoff` drops in all layers.

    Args:
        model: a landmark model with a context miss token.
        stream: the validation split.
        tokenizer: of the stream.
        config: the row's settings; at most TOKENS tokens are read for each measurement.
        path: file of the measurements, which is written if it is missing.
        progress: called with measurements done, and in all.
    """
    tokens = min(config.eval.tokens or TOKENS, TOKENS)

    def measure(cutoffs: Sequence[float]) -> tuple[float, list[float]]:
        settings = replace(config.eval, tokens=tokens, split="validation")
        cmt = replace(config.cmt, cutoff=0.0, cutoffs=list(cutoffs), per_layer=False)
        results = evaluate(model, stream, tokenizer, replace(config, eval=settings, cmt=cmt))
        return results["nll"], [statistics.fmean(heads) for heads in results["memory"]["drop_rates"]]

    layers = model.config.num_layers
    if not path.exists():
        found = measure_layers(measure, layers, progress)
        write_json(path, [[asdict(effect) for effect in effects] for effects in found])
    measured = [[CutoffEffect(**effect) for effect in effects] for effects in read_json(path)]
    return cheapest_cutoffs(measured, statistics.fmean(measure([config.cmt.cutoff] * layers)[1]))


def measure_layers(
    measure: Measure, num_layers: int, progress: Callable[[int, int], None] | None = None
) -> list[list[CutoffEffect]]:
    """The effect of each of `CUTOFFS` in each layer, alone.

    measure: takes a cutoff for each layer; returns the loss in nats per token, and the share of lookups that each layer
    drops. progress: called with measurements done, and in all.
    """
    base, dropped = measure([0.0] * num_layers)
    found = [[CutoffEffect(0.0, dropped[layer], 0.0)] for layer in range(num_layers)]
    for layer, effects in enumerate(found):
        for cutoff in CUTOFFS[1:]:
            loss, dropped = measure([cutoff if other == layer else 0.0 for other in range(num_layers)])
            effects.append(CutoffEffect(cutoff, dropped[layer], loss - base))
            if progress is not None:
                progress(layer * (len(CUTOFFS) - 1) + len(effects) - 1, num_layers * (len(CUTOFFS) - 1))
    return found


def cheapest_cutoffs(layers: Sequence[Sequence[CutoffEffect]], share: float) -> list[float]:
    """A cutoff for each layer: the combination of least cost whose dropped shares have a mean of at least `share`.

    A knapsack problem, solved layer by layer with shares rounded down to parts of 1 / STEPS. If no combination drops
    enough, the one that drops most is chosen.
    """
    most = sum(max(_parts(effect.dropped) for effect in effects) for effects in layers)
    goal = min(round(share * STEPS * len(layers)), most)
    best: dict[int, tuple[float, list[float]]] = {0: (0.0, [])}  # parts dropped so far → cost, cutoffs
    for effects in layers:
        reached: dict[int, tuple[float, list[float]]] = {}
        for parts, (cost, cutoffs) in best.items():
            for effect in effects:
                total = min(goal, parts + _parts(effect.dropped))
                if total not in reached or cost + effect.cost < reached[total][0]:
                    reached[total] = cost + effect.cost, [*cutoffs, effect.cutoff]
        best = reached
    return best[goal][1]


def _parts(share: float) -> int:
    return int(share * STEPS + 1e-9)
