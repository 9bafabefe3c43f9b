"""A training by several processes is that of one, in whole or in part."""

from pathlib import Path

import pytest
import torch

from landmark.utils.metrics_csv import read_metrics
from tests.together import together
from tests.training.together_case import train, train_all
from tests.training.training_case import EXTRAS

KINDS = ("transformer_xl", EXTRAS)  # several windows a step; and random draws beside the text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each kind of model, trained by one process; by two; by one, then two, then one."""
    root = tmp_path_factory.mktemp("processes")
    plan = {}
    for kind in KINDS:
        train(root / "one" / kind, kind)
        train(root / "changing" / kind, kind, stop=12)  # its last checkpoint is of step 8
        plan[f"two/{kind}"] = {"kind": kind}
        plan[f"changing/{kind}"] = {"kind": kind, "stop": 20}  # from step 8 to the checkpoint of step 16
    together(2, train_all, root, plan)
    for kind in KINDS:
        train(root / "changing" / kind, kind)
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["two", "changing"])
def test_losses_are_those_of_one_process(trained, kind, how):
    """All that are logged, to the nine digits that are."""
    expected, ours = (read_metrics(trained / name / kind / "run" / "metrics.csv") for name in ("one", how))
    assert [row["step"] for row in ours] == sorted({*range(3, 25, 3), 10, 20})
    for row, other in zip(ours, expected, strict=True):
        losses = {name for name in other if name.endswith(("/loss", "/gradient_norm"))}
        assert [row[name] for name in losses] == pytest.approx([other[name] for name in losses], rel=2e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["two", "changing"])
def test_weights_are_those_of_one_process(trained, kind, how):
    """Only sums are made in another order: a float64's rounding error of 1e-16, through 24 steps of AdamW."""
    last = Path("run", "checkpoints", "step-00000024.ckpt")
    expected, ours = (torch.load(trained / name / kind / last, weights_only=True) for name in ("one", how))
    for name, weight in expected["state_dict"].items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(ours["state_dict"][name], weight, rtol=0, atol=1e-12)
    for name in ("train/loss", "validation/loss"):
        losses = [each["measurements"]["latest"][name] for each in (ours, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-13)
