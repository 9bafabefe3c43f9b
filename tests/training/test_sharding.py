"""Weights shared out over real processes train as one process does, and their checkpoints suit any number of them."""

from pathlib import Path

import pytest
import torch

from landmark.config import to_config
from landmark.config.checks import check
from landmark.models import Decoder, load, save
from landmark.training.sharding import layers
from landmark.utils.metrics_csv import read_metrics
from tests.configurations import compose_conf, decoder_config
from tests.together import together
from tests.training.together_case import train, train_all
from tests.training.training_case import EXTRAS

# Muon needs whole matrices, and a context miss token is computed by the layers. A window is a micro-batch: one process
# adds up four of them, two processes two each, four processes none. In float64: Lightning's strategy has no 64-true.
SETTINGS = {"kind": EXTRAS, "steps": 6, "micro_batch": 1, "precision": "32-true"}
SETTINGS |= {"checkpoint_every": 2, "log_every": 1, "validate_every": 3, "validate_batches": 1}
MIXED = {"precision": "bf16-mixed", "muon_lr": None}
SHARDED = {"strategy": "fsdp", **SETTINGS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model trained by one process; by two and by four that share it; by four, then by two, then by one."""
    root = tmp_path_factory.mktemp("sharded")
    train(root / "one", **SETTINGS)
    train(root / "one_bf16", **SETTINGS | MIXED)
    by_four = {"four": SHARDED, "fewer": SHARDED | {"stop": 3}}  # its last checkpoint is of step 2
    by_two = {"two": SHARDED, "fewer": SHARDED | {"stop": 5}, "two_bf16": SHARDED | MIXED}  # to that of step 4
    together(4, train_all, root, by_four)
    together(2, train_all, root, by_two)
    train(root / "fewer", **SETTINGS)
    return root


def last_checkpoint(folder: Path) -> dict:
    return torch.load(folder / "run" / "checkpoints" / "step-00000006.ckpt", weights_only=True)


@pytest.mark.parametrize("how", ["two", "four", "fewer"])
def test_checkpoints_are_those_of_one_process(trained, how):
    """Weights and the optimizer's state, but for a float64's rounding errors."""
    expected, ours = (last_checkpoint(trained / name) for name in ("one", how))
    assert list(ours["state_dict"]) == list(expected["state_dict"])
    for name, weight in expected["state_dict"].items():
        assert weight.dtype == torch.float64
        torch.testing.assert_close(ours["state_dict"][name], weight, rtol=0, atol=1e-12)
    (theirs,), (state,) = expected["optimizer_states"], ours["optimizer_states"]
    assert state["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(state["state"], theirs["state"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", ["two", "four", "fewer"])
def test_losses_are_those_of_one_process(trained, how):
    """All that are logged, to the nine digits that are, and the last ones to more."""
    expected, ours = (read_metrics(trained / name / "run" / "metrics.csv") for name in ("one", how))
    assert [row["step"] for row in ours] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(ours, expected, strict=True):
        losses = {name for name in other if name.endswith(("/loss", "/gradient_norm", "/learning_rate"))}
        assert [row[name] for name in losses] == pytest.approx([other[name] for name in losses], rel=2e-9)
    expected, ours = (last_checkpoint(trained / name)["measurements"]["latest"] for name in ("one", how))
    for name in ("train/loss", "validation/loss"):
        assert ours[name] == pytest.approx(expected[name], rel=1e-12)


def test_weights_of_a_finished_run_are_whole(trained):
    saved, kept = load(trained / "four" / "run").state_dict(), last_checkpoint(trained / "four")["state_dict"]
    assert {f"model.{name}" for name in saved} == set(kept)
    for name, weight in saved.items():
        torch.testing.assert_close(weight.double(), kept[f"model.{name}"], rtol=0, atol=1e-6)


def test_mixed_precision_learns_the_same(trained):
    expected, ours = (read_metrics(trained / f"{name}_bf16" / "run" / "metrics.csv")[-1] for name in ("one", "two"))
    assert ours["validation/loss"] == pytest.approx(expected["validation/loss"], rel=1e-4)


@pytest.fixture
def model():
    return Decoder(decoder_config("landmark", 320, 3, 2, 8, 32, landmark_id=257, block_size=5))


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_layers_of_transformers_are_the_units(tmp_path, lora_rank):
    pytest.importorskip("transformers")
    from landmark.models.pretrained import start_from
    from tests.huggingface.conftest import make_model

    make_model("qwen3").save_pretrained(tmp_path)
    shape = decoder_config("landmark", 320, 3, 2, 8, 32, landmark_id=257, block_size=5)
    found = layers(start_from(str(tmp_path), shape, lora_rank))
    assert {type(layer).__name__ for layer in found} == {"Qwen3DecoderLayer"}


@pytest.mark.parametrize("experiment", ["finetune_llama", "table1_pg19"])
def test_the_preset_composes(experiment):
    config = to_config(compose_conf([f"+experiment={experiment}", "trainer=fsdp"]))
    check(config)
    assert (config.trainer.strategy, config.trainer.accelerator) == ("fsdp", "gpu")


@pytest.mark.parametrize("kind", ["decoder", "transformers"])
def test_weights_gathered_elsewhere_are_saved(model, tmp_path, kind):
    if kind == "transformers":
        pytest.importorskip("transformers")
        from landmark.models.pretrained import start_from
        from tests.huggingface.conftest import make_model

        make_model("llama").save_pretrained(tmp_path / "base")
        model = start_from(str(tmp_path / "base"), model.config)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    save(model, tmp_path, state)
    for name, tensor in load(tmp_path).state_dict().items():
        assert torch.equal(tensor, state[name])
