"""A training by several processes is that of one: whole models (DDP), and weights shared out over devices (FSDP)."""

from pathlib import Path

import pytest
import torch

from landmark.experiment.training.sharding import layers
from landmark.models import load, save
from landmark.utils.metrics_csv import read_metrics
from tests.configurations import decoder_config
from tests.experiment.training.training_case import EXTRAS, train_all, train_exactly
from tests.together import together

XL = {"kind": "transformer_xl"}  # several windows a step
# Random draws beside the text; Muon needs whole matrices; a context miss token is computed by the layers. A window is a
# micro-batch: one process adds up four of them, two processes two each, four processes none. Lightning's strategy for
# weights that are shared out has no 64-true: weights are float64 all the same.
SMALL = {"kind": EXTRAS, "steps": 6, "micro_batch": 1, "precision": "32-true"}
SMALL |= {"checkpoint_every": 2, "log_every": 1, "validate_every": 3, "validate_batches": 1}
MIXED = {"precision": "bf16-mixed", "muon_lr": None}
SHARDED = {"strategy": "fsdp", **SMALL}
# By the name of a case: the training by one process with which it is compared, and its steps that are logged.
CASES = {name: ("xl", sorted({*range(3, 25, 3), 10, 20})) for name in ("xl_two", "xl_changing")}
CASES |= {name: ("one", [*range(1, 7)]) for name in ("two", "two_sharded", "four_sharded", "fewer_sharded")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By one process; by two or four; by one, two and one again; by four that share the weights, two and one."""
    root = tmp_path_factory.mktemp("processes")
    train_exactly(root / "xl", **XL)
    train_exactly(root / "xl_changing", **XL, stop=12)  # its last checkpoint is of step 8
    train_exactly(root / "one", **SMALL)
    train_exactly(root / "one_bf16", **SMALL | MIXED)
    together(4, train_all, root, {"four_sharded": SHARDED, "fewer_sharded": SHARDED | {"stop": 3}})
    by_two = {"xl_two": XL, "xl_changing": XL | {"stop": 20}, "two": SMALL, "two_sharded": SHARDED}
    by_two |= {"fewer_sharded": SHARDED | {"stop": 5}, "two_bf16": SHARDED | MIXED}
    together(2, train_all, root, by_two)
    train_exactly(root / "xl_changing", **XL)
    train_exactly(root / "fewer_sharded", **SMALL)
    return root


def last_checkpoint(folder: Path) -> dict:
    return torch.load(max((folder / "run" / "checkpoints").glob("*.ckpt")), weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_and_losses_are_those_of_one_process(trained, case):
    """Weights and the optimizer's state; all losses that are logged, to the nine digits that are. Only sums are made in
    another order: a float64's rounding error, through all steps."""
    one, steps = CASES[case]
    expected, ours = (last_checkpoint(trained / name) for name in (one, case))
    assert list(ours["state_dict"]) == list(expected["state_dict"])
    for name, weight in expected["state_dict"].items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(ours["state_dict"][name], weight, rtol=0, atol=1e-12)
    (theirs,), (state,) = expected["optimizer_states"], ours["optimizer_states"]
    assert state["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(state["state"], theirs["state"], rtol=1e-9, atol=1e-12)
    for name in ("train/loss", "validation/loss"):
        losses = [each["measurements"]["latest"][name] for each in (ours, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    expected, ours = (read_metrics(trained / name / "run" / "metrics.csv") for name in (one, case))
    assert [row["step"] for row in ours] == steps
    for row, other in zip(ours, expected, strict=True):
        names = {name for name in other if name.endswith(("/loss", "/gradient_norm", "/learning_rate"))}
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], rel=2e-9)


def test_weights_of_a_finished_run_are_whole_and_mixed_precision_learns_the_same(trained):
    folder = trained / "four_sharded"
    saved, kept = load(folder / "run").state_dict(), last_checkpoint(folder)["state_dict"]
    assert {f"model.{name}" for name in saved} == set(kept)
    for name, weight in saved.items():
        torch.testing.assert_close(weight.double(), kept[f"model.{name}"], rtol=0, atol=1e-6)
    expected, ours = (read_metrics(trained / f"{name}_bf16" / "run" / "metrics.csv")[-1] for name in ("one", "two"))
    assert ours["validation/loss"] == pytest.approx(expected["validation/loss"], rel=1e-4)


SHAPE = decoder_config("landmark", 320, 3, 2, 8, 32, landmark_id=257, block_size=5)


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_layers_of_transformers_are_the_units_and_their_weights_gathered_elsewhere_are_saved(tmp_path, lora_rank):
    """The sharded trainings above save those of a decoder."""
    pytest.importorskip("transformers")
    from landmark.models.pretrained import start_from
    from tests.models.huggingface.conftest import make_model

    make_model("qwen3").save_pretrained(tmp_path / "base")
    model = start_from(str(tmp_path / "base"), SHAPE, lora_rank)
    assert {type(layer).__name__ for layer in layers(model)} == {"Qwen3DecoderLayer"}
    if lora_rank is None:
        state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        save(model, tmp_path, state)
        for name, tensor in load(tmp_path).state_dict().items():
            assert torch.equal(tensor, state[name])
