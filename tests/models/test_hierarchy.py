"""A model with a hierarchy of landmarks: reading in chunks is reading, biases are learned, the rest is refused."""

import math
from dataclasses import replace

import pytest
import torch

from landmark.config.schema import ModelConfig
from landmark.data import load_tokenizer
from landmark.memory import Memory
from landmark.models.config import check_decoder
from landmark.retriever import Retriever
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch
from tests.models.test_decoder import LANDMARK, LOOKING_BACK, TINY, tiny

GROUPS = replace(LANDMARK, **LOOKING_BACK, landmark_key="mean", landmark_bias=True, fan_out=2, levels=2)


@pytest.mark.parametrize("config", [GROUPS, replace(LANDMARK, fan_out=3), replace(GROUPS, num_kv_heads=1)])
@torch.no_grad()
def test_memory_that_holds_everything_reads_as_one_window(config):
    model = tiny(config)
    tokens = torch.randint(0, 50, (2, 70))
    memory = model.new_memory(k=20)
    assert isinstance(memory, Memory)
    parts = [model(chunk, memory=memory) for chunk in tokens.split([17, 1, 1, 30, 21], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-10, rtol=1e-10)


def test_groups_weigh_as_much_as_their_blocks_at_first_and_learn_it_with_the_landmark_bias():
    batch = WindowBatch(torch.randint(0, 50, (2, 60)), torch.randint(0, 50, (2, 60)), torch.tensor([2, 5]))
    for config in (GROUPS, replace(LANDMARK, fan_out=2)):
        torch.manual_seed(0)
        model = tiny(config)
        biases = [p for name, p in model.named_parameters() if name.endswith("group_bias")]
        assert len(biases) == config.num_layers
        for bias in biases:
            assert bias.shape == (config.levels, config.num_heads)
        sum(loss for loss, _ in model.window_losses(batch)).backward()
        assert all((p.grad is not None and bool(p.grad.all())) == config.landmark_bias for p in biases)
    from landmark.models import Decoder

    assert Decoder(GROUPS).blocks[0].attention.group_bias.eq(math.log(2)).all()


def test_the_fingerprint_of_other_models_is_that_of_before():
    """Memories that were saved before there were groups can still be loaded."""
    assert "fan_out" not in repr(LANDMARK)
    assert "levels" not in repr(LANDMARK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fan_out": 1}, "model.fan_out=1, model.levels=1: must be at least 2 and 1"),
        ({"fan_out": None}, "model.levels=2: are levels of groups"),
        ({"backend": "triton"}, "fused kernels"),
        ({"local_blocks": 1}, "model.local_blocks=1: goes without groups"),
        ({"masked": True}, "model.masked=true: goes without groups"),
        ({"kind": "transformer", "landmark_key": "token", "landmark_bias": False}, "no landmarks"),
    ],
)
def test_impossible_models_are_refused(change, message):
    config = GROUPS if change != {"fan_out": 1} else replace(GROUPS, levels=1)
    with pytest.raises(UserError, match=message):
        replace(config, **change)


def test_models_of_transformers_and_retrievers_have_no_groups():
    shape = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
    with pytest.raises(UserError, match="model.fan_out=4: is for our decoder"):
        check_decoder(ModelConfig("landmark", **shape, block_size=5, family="llama", fan_out=4))
    with pytest.raises(UserError, match="model.fan_out=2"):
        Retriever(tiny(GROUPS), load_tokenizer("bytes"))
    assert TINY.fan_out is None
