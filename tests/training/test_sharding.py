"""What can be checked of shared-out weights without several GPUs: Lightning lets no CPU do it."""

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy

from landmark.config import to_config
from landmark.config.checks import check
from landmark.models import Decoder, DecoderConfig, load, save
from landmark.models.decoder import Block
from landmark.training.sharding import layer_types, strategy
from tests.configurations import compose_conf


@pytest.fixture
def model():
    return Decoder(DecoderConfig("landmark", 320, 3, 2, 8, 32, landmark_id=257, block_size=5))


def test_layers_are_the_units(model):
    assert layer_types(model) == {Block}
    made = strategy("fsdp", model)
    assert isinstance(made, FSDPStrategy)
    assert strategy("ddp", model) == "ddp"


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_layers_of_transformers_are_the_units(tmp_path, lora_rank):
    pytest.importorskip("transformers")
    from landmark.models.pretrained import start_from
    from tests.huggingface.conftest import make_model

    make_model("qwen3").save_pretrained(tmp_path)
    shape = DecoderConfig("landmark", 320, 3, 2, 8, 32, landmark_id=257, block_size=5)
    found = layer_types(start_from(str(tmp_path), shape, lora_rank))
    assert {kind.__name__ for kind in found} == {"Qwen3DecoderLayer"}


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
