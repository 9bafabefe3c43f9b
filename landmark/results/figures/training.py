"""Loss of runs against the step."""

from collections.abc import Mapping
from typing import Any

from landmark.results.figures.marks import Panel, curves, point
from landmark.results.figures.style import DASHED, Look, colours, frame

Curve = list[tuple[float, float]]
MOST = 400  # points of a curve, about
SEEN = 0.97  # share of the losses in training that the picture has room for: the first are far above all others


def panel(runs: Mapping[str, Mapping[str, Curve]]) -> Panel:
    """Curves of the training loss, and dashed of the validation loss.

    runs: name of a run to "train" and "validation", and these to (step, nats a token).
    """
    points, looks = [], {}
    for colour, (name, each) in zip(colours(len(runs)), runs.items(), strict=True):
        for kind, label, look in (
            ("train", name, Look(colour)),
            ("validation", f"{name}, validation", Look(colour, dash=DASHED)),
        ):
            if each[kind]:
                looks[label] = look
                every = max(1, len(each[kind]) // MOST)
                points += [point(label, step, loss) for step, loss in each[kind][::-every][::-1]]
    losses = sorted(loss for each in runs.values() for _, loss in each["train"])
    domain, _ = frame({"": losses}, losses[int(SEEN * (len(losses) - 1))])
    y: dict[str, Any] = {"title": "loss, nats a token"} | ({"scale": {"domain": domain}} if domain else {})
    return curves("Training", points, looks, {"title": "step"}, y, marks="hidden")
