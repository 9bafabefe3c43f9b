"""A tiny model and a text for it."""

import numpy as np
import pytest

from landmark.experiment.data import load_tokenizer
from landmark.models import Decoder
from tests.configurations import decoder_config
from tests.saved import random_decoder

BLOCK, LOCAL, LAYERS, HEADS = 5, 18, 2, 2
TOKENIZER = load_tokenizer("bytes")
TEXT = "Ein Wörterbuch</script> & <b>ten\n €uro</b> "  # characters of several tokens, and HTML


def model_of(cmt=False, kind="landmark", block=BLOCK) -> Decoder:
    """Random weights, large enough that every head has preferences of its own."""
    config = decoder_config(
        kind, TOKENIZER.vocab_size, LAYERS, HEADS, 8, 16, landmark_id=TOKENIZER.landmark, block_size=block, cmt=cmt
    )
    return random_decoder(config, std=0.3)


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    return TOKENIZER.encode(TEXT * 2)
