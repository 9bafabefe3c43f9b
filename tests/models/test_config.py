"""A decoder's configuration refuses settings from which no decoder can be built."""

from dataclasses import replace

import pytest

from landmark.config.schema import ModelConfig
from landmark.models.config import DecoderConfig, decoder_config
from landmark.utils.errors import UserError

SHAPE = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
MODEL = ModelConfig("transformer", **SHAPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mamba"}, "model.kind=mamba: must be one of transformer, landmark, transformer_xl"),
        ({"kind": "landmark"}, "model.block_size=null: a landmark model needs it"),
        ({"kind": "landmark", "block_size": 0}, "model.block_size=0: must be at least 1"),
        ({"kind": "landmark", "block_size": 5, "alpha": 1.5}, "model.alpha=1.5: must be at least 0 and at most 1"),
        ({"kind": "landmark", "block_size": 5, "landmark_key": "pooled"}, "model.landmark_key=pooled: must be one of"),
        ({"kind": "landmark", "block_size": 5, "landmark_bias": True}, "needs a channel that does not turn"),
        ({"kind": "transformer_xl", "window": 8}, "model.cache=null: a transformer_xl model needs it"),
        ({"num_layers": 0}, "model.num_layers=0: must be at least 1"),
        ({"head_dim": 7}, "model.head_dim=7: must be even"),
        ({"num_kv_heads": 3}, "does not divide"),
        ({"key_offset": 1.5}, "model.key_offset=1.5"),
        ({"backend": "magic"}, "model.backend=magic: must be one of auto, reference, blockwise, triton"),
    ],
)
def test_impossible_models_are_refused(change, message):
    """Before a tokenizer is there, by the names of the settings."""
    decoder_config(MODEL)
    with pytest.raises(UserError, match=message):
        decoder_config(replace(MODEL, **change))


def test_settings_of_other_kinds_are_left_out():
    decoder_config(ModelConfig("transformer", **SHAPE, block_size=0))
    with pytest.raises(UserError, match="model=transformer has no landmarks"):
        decoder_config(ModelConfig("transformer", **SHAPE), cmt=True)


def test_files_name_what_is_not_the_default():
    flat = {"kind": "landmark", "vocab_size": 20, "landmark_id": 19, "block_size": 3, "key_offset": 0.5, **SHAPE}
    config = DecoderConfig.from_flat(flat | {"fan_out": 4, "levels": 2, "qk_norm": False, "rope_base": None})
    assert config.options == {"fan_out": 4, "levels": 2}
    assert config.to_flat() == flat | config.options
    assert DecoderConfig.from_flat(config.to_flat()) == config


def test_a_memory_knows_its_model_by_all_but_the_backend():
    config = DecoderConfig.from_flat(
        {"kind": "landmark", "vocab_size": 20, "landmark_id": 19, "block_size": 3, **SHAPE}
    )
    same = replace(config, backend="reference"), replace(config, architecture="mine")
    others = replace(config, options={"fan_out": 4}), replace(config, keys=replace(config.keys, norm=True))
    assert {each.fingerprint() for each in same} == {config.fingerprint()}
    assert len({each.fingerprint() for each in (config, *others)}) == 3
