"""Loss of runs against the step."""

from collections.abc import Mapping

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
        validation = f"{name}, validation"
        known = {name: Look(colour), validation: Look(colour, dash=DASHED)}
        for label, curve in ((name, each["train"]), (validation, each["validation"])):
            if curve:
                looks[label] = known[label]
                every = max(1, len(curve) // MOST)
                points += [point(label, step, loss) for step, loss in curve[::-every][::-1]]
    losses = sorted(loss for each in runs.values() for _, loss in each["train"])
    scale, _ = frame({"": losses}, losses[int(SEEN * (len(losses) - 1))])
    y = {"title": "loss, nats a token", "scale": scale}
    return curves("Training", points, looks, {"title": "step"}, y, marks="hidden")
