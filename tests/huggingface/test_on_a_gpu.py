"""Reading on a GPU without one: tensors that have a device and no numbers show what would wait for the device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from landmark.huggingface import wrap
from landmark.memory import sparse_attention, sparse_attention_kernels
from tests.huggingface.conftest import make_model, make_tokenizer

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch is built without CUDA")


@pytest.mark.parametrize("mapping", ["true", "stingy"])
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_nothing_waits_and_nothing_is_elsewhere(family, mapping, monkeypatch):
    """Numbers of a GPU that are looked at on the CPU, and operations between devices, raise errors here."""
    monkeypatch.setattr(sparse_attention_kernels, "read_tiles", sparse_attention.read_tiles)
    monkeypatch.setattr(sparse_attention, "constant", sparse_attention.constant.__wrapped__)  # keeps no such tensors
    settings = {"k": 3, "window": 8, "rerank": 6, "mapping": mapping}
    model = make_model(family).bfloat16()
    model = wrap(model, make_tokenizer(), block_size=4, memory=settings, local=16, landmarks="none")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model._apply(lambda weight: torch.empty_like(weight, device="cuda"))  # without numbers
        past = model.new_memory()
        past.expect(100)
        ids = torch.empty(2, 82, dtype=torch.int64, device="cuda")
        for part in ids.split([80, 1, 1], 1):
            logits = model(part, past_key_values=past, logits_to_keep=1).logits
            assert logits.shape == (2, 1, 257)
            assert logits.is_cuda
        assert past.stats["blocks_kept"] == 20
