"""A decoder's configuration refuses settings from which no decoder can be built."""

from dataclasses import fields, replace

import pytest

from landmark.config.schema import ModelConfig
from landmark.models.config import DecoderConfig, check_decoder
from landmark.utils.errors import UserError

SHAPE = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
MODEL = ModelConfig("transformer", **SHAPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mamba"}, "model.kind=mamba: must be one of transformer, landmark, transformer_xl"),
        ({"kind": "landmark"}, "model.block_size=null: a landmark model needs it"),
        ({"kind": "landmark", "block_size": 0}, "model.block_size=0: must be at least 1"),
        ({"kind": "landmark", "block_size": 5, "joint_softmax": 1.5}, "model.joint_softmax=1.5: must be from 0 to 1"),
        ({"kind": "landmark", "block_size": 5, "landmark_key": "pooled"}, "model.landmark_key=pooled: must be one of"),
        ({"kind": "landmark", "block_size": 5, "landmark_bias": True}, "needs a channel that does not turn"),
        ({"kind": "transformer_xl", "window": 8}, "model.cache=null: a transformer_xl model needs it"),
        ({"num_layers": 0}, "model.num_layers=0: must be at least 1"),
        ({"head_dim": 7}, "model.head_dim=7: must be even"),
        ({"num_kv_heads": 3}, "does not divide"),
        ({"key_offset": 1.5}, "model.key_offset=1.5"),
        ({"backend": "magic"}, "model.backend=magic: must be one of auto, reference, blockwise, triton"),
        ({"family": "llama", "key_offset": 0.5}, "model.key_offset=0.5: is for our decoder"),
        ({"family": "llama", "fan_out": 4}, "model.fan_out=4: is for our decoder"),
    ],
)
def test_impossible_models_are_refused(change, message):
    """Before a tokenizer is there, by the names of the settings."""
    check_decoder(MODEL)
    with pytest.raises(UserError, match=message):
        check_decoder(replace(MODEL, **change))


def test_settings_of_other_kinds_are_left_out():
    check_decoder(ModelConfig("transformer", **SHAPE, block_size=0))
    with pytest.raises(UserError, match="model=transformer has no landmarks"):
        check_decoder(ModelConfig("transformer", **SHAPE), cmt=True)


def test_earlier_files_have_true_for_one():
    flat = {"kind": "landmark", "vocab_size": 20, "landmark_id": 19, "block_size": 3, **SHAPE}
    earlier, now = (DecoderConfig.from_flat(flat | {"joint_softmax": value}) for value in (True, 1.0))
    assert earlier == now


def test_it_is_flat_on_disk_and_of_few_fields_here():
    flat = {"kind": "landmark", "vocab_size": 20, "landmark_id": 19, "block_size": 3, "key_offset": 0.5, **SHAPE}
    config = DecoderConfig.from_flat(flat | {"fan_out": 4, "levels": 2})
    assert config.options == {"fan_out": 4, "levels": 2}
    assert DecoderConfig.from_flat(config.to_flat()) == config
    assert flat.items() <= config.to_flat().items()
    assert len(fields(DecoderConfig)) <= 14
