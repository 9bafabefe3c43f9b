"""A decoder's configuration refuses settings from which no decoder can be built."""

from dataclasses import replace

import pytest

from landmark.config.schema import ModelConfig
from landmark.models.config import DecoderConfig, check_decoder
from landmark.utils.errors import UserError

TINY = DecoderConfig("transformer", vocab_size=64, num_layers=2, num_heads=2, head_dim=8, mlp_dim=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mamba"}, "model.kind=mamba"),
        ({"kind": "landmark"}, "model.block_size=null"),
        ({"kind": "transformer_xl"}, "model.window=null"),
        ({"head_dim": 7}, "model.head_dim=7: must be even"),
        ({"num_kv_heads": 3}, "does not divide"),
        ({"backend": "magic"}, "model.backend=magic"),
        ({"cmt": True}, "model=transformer has no landmarks"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mamba"}, "model.kind=mamba: must be one of transformer, landmark, transformer_xl"),
        ({"kind": "landmark"}, "model.block_size=null: a landmark model needs it"),
        ({"kind": "landmark", "block_size": 0}, "model.block_size=0: must be at least 1"),
        ({"kind": "transformer_xl", "window": 8}, "model.cache=null: a transformer_xl model needs it"),
        ({"num_layers": 0}, "model.num_layers=0: must be at least 1"),
        ({"backend": "magic"}, "model.backend=magic: must be one of auto, reference, blockwise, triton"),
    ],
)
def test_settings_are_named_before_a_tokenizer_is_there(change, message):
    model = ModelConfig(**{"kind": "transformer", "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32})
    check_decoder(model)
    with pytest.raises(UserError, match=message):
        check_decoder(replace(model, **change))


def test_settings_of_other_kinds_are_left_out():
    shape = {"num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 32}
    check_decoder(ModelConfig("transformer", **shape, block_size=0))
    with pytest.raises(UserError, match="model=transformer has no landmarks"):
        check_decoder(ModelConfig("transformer", **shape), cmt=True)
