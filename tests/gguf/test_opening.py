import logging

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the optional extra `gguf` is not installed")

from landmark.gguf.opening import open_gguf
from tests.gguf.writing import CASES, LLAMA3, make_model, write


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


IDS = torch.arange(3, 83)[None]


def extra_tensors(model):
    rope = model.config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return {}
    dims = model.config.head_dim
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, dims, 2).float() / dims)
    return {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).numpy()}


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_each_family_comes_out_as_it_was_written(case, tmp_path):
    model = make_model(case)
    file = write(tmp_path / "tiny.gguf", case, model, tensors=extra_tensors(model))
    found = open_gguf(file, torch.float32)
    torch.testing.assert_close(logits(found, IDS), logits(model, IDS), rtol=0, atol=2e-5)
