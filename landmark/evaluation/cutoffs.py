"""A cutoff of the context miss token for each layer: the same share of lookups dropped where it costs least.

One cutoff for all layers (paper, Appendix D, Table 3) drops whatever weighs little, wherever it is. Here the cutoff
of every layer is raised alone, on the validation split, which shows what it drops and what that costs; then the cutoffs
are chosen whose costs, added up, are least among those that drop enough.
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
STEPS = 1000  # parts of the share of lookups that a choice is made in


@dataclass(frozen=True)
class Choice:
    """One cutoff in one layer: the share of the layer's lookups that it drops, and what that costs, nats a token."""

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
    """A cutoff for each layer, to drop on the validation split what `cmt.cutoff` drops there in all layers.

    stream: the validation split. path: where the measurements are kept, or are from another choice.
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
        write_json(path, [[asdict(choice) for choice in choices] for choices in found])
    measured = [[Choice(**choice) for choice in choices] for choices in read_json(path)]
    return choose(measured, statistics.fmean(measure([config.cmt.cutoff] * layers)[1]))


def measure_layers(
    measure: Measure, num_layers: int, progress: Callable[[int, int], None] | None = None
) -> list[list[Choice]]:
    """What each of `CUTOFFS` does in each layer, alone.

    measure: takes a cutoff for each layer, returns the loss in nats a token and the share that each layer drops.
    progress: called with measurements done and in all.
    """
    base, dropped = measure([0.0] * num_layers)
    found = [[Choice(0.0, dropped[layer], 0.0)] for layer in range(num_layers)]
    for layer, choices in enumerate(found):
        for cutoff in CUTOFFS[1:]:
            loss, dropped = measure([cutoff if other == layer else 0.0 for other in range(num_layers)])
            choices.append(Choice(cutoff, dropped[layer], loss - base))
            if progress is not None:
                progress(layer * (len(CUTOFFS) - 1) + len(choices) - 1, num_layers * (len(CUTOFFS) - 1))
    return found


def choose(layers: Sequence[Sequence[Choice]], share: float) -> list[float]:
    """A cutoff for each layer: of all whose dropped shares have a mean of at least `share`, those of least cost.

    A knapsack, layer by layer, with the share in `STEPS` parts, rounded down; where nothing drops enough, all is.
    """
    most = sum(max(_parts(choice.dropped) for choice in choices) for choices in layers)
    goal = min(round(share * STEPS * len(layers)), most)
    best: dict[int, tuple[float, list[float]]] = {0: (0.0, [])}  # parts dropped so far → cost, cutoffs
    for choices in layers:
        reached: dict[int, tuple[float, list[float]]] = {}
        for parts, (cost, cutoffs) in best.items():
            for choice in choices:
                total = min(goal, parts + _parts(choice.dropped))
                if total not in reached or cost + choice.cost < reached[total][0]:
                    reached[total] = cost + choice.cost, [*cutoffs, choice.cutoff]
        best = reached
    return best[goal][1]


def _parts(share: float) -> int:
    return int(share * STEPS + 1e-9)
