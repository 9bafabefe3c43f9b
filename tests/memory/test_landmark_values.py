"""Blocks that are not retrieved are read by the values of their landmarks, in a memory as in a window."""

import pytest
import torch

from landmark.attention import landmark_attention
from landmark.memory import Memory
from landmark.models import Decoder, DecoderConfig
from landmark.utils.errors import UserError

BLOCK = 3
WIDTH = BLOCK + 1


def read(memory, q, k, v, chunk, layer=1):
    outs = []
    for start in range(0, q.shape[2], chunk):
        part = slice(start, start + chunk)
        outs.append(memory.attend(layer, q[:, :, part], k[:, :, part], v[:, :, part]))
        memory.commit()
    return torch.cat(outs, 2)


@pytest.mark.parametrize("tier", ["device", "disk"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_memory_reads_as_a_window(kv_heads, tier):
    """A block at a time, so a query has the same gated blocks in both. No channel turns, so places do not count."""
    q = torch.randn(2, 2, 9 * WIDTH, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 9 * WIDTH, 8, dtype=torch.float64)
    memory = Memory(BLOCK, k=2, rope_base=torch.zeros(4), tie_layers=(), tier=tier, landmark_values=True)
    expected = landmark_attention(q, k, v, block_size=BLOCK, top_k=2, landmark_values=True)
    torch.testing.assert_close(read(memory, q, k, v, WIDTH), expected, atol=1e-10, rtol=0)
    without = landmark_attention(q, k, v, block_size=BLOCK, top_k=2)
    assert (expected - without)[:, :, 3 * WIDTH :].abs().amax() > 0.01


def test_nothing_changes_where_all_blocks_are_retrieved():
    q, k, v = torch.randn(3, 1, 2, 7 * WIDTH, 8, dtype=torch.float64)
    ours, plain = (read(Memory(BLOCK, k=9, landmark_values=on), q, k, v, 5) for on in (True, False))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("max_blocks", [None, 4])
def test_a_saved_memory_and_a_selected_sample_go_on_alike(tmp_path, max_blocks):
    q, k, v = torch.randn(3, 2, 2, 10 * WIDTH, 8)
    first, last = slice(0, 9 * WIDTH), slice(9 * WIDTH, None)
    settings = {"k": 2, "max_blocks": max_blocks, "landmark_values": True}
    memory, loaded = Memory(BLOCK, **settings), Memory(BLOCK, **settings)
    read(memory, *(x[:, :, first] for x in (q, k, v)), 5)
    memory.save(tmp_path / "saved")
    loaded.load(tmp_path / "saved")
    swapped = memory.select(torch.tensor([1, 0]))
    expected = read(memory, *(x[:, :, last] for x in (q, k, v)), 5)
    torch.testing.assert_close(read(loaded, *(x[:, :, last] for x in (q, k, v)), 5), expected, atol=0, rtol=0)
    torch.testing.assert_close(read(swapped, *(x.flip(0)[:, :, last] for x in (q, k, v)), 5), expected.flip(0))
    with pytest.raises(UserError, match="model.landmark_values=True, here it is False"):
        Memory(BLOCK, k=2, max_blocks=max_blocks).load(tmp_path / "saved")


def test_a_model_reads_in_chunks_as_in_a_window():
    """With true positions: those of blocks that the stingy mapping moves differ from a window's."""
    shape = {"vocab_size": 20, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}
    keys = {"key_offset": 0.5, "rotary_fraction": 0.5, "landmark_key": "mean", "landmark_bias": True, "qk_norm": True}
    config = DecoderConfig("landmark", landmark_id=19, block_size=BLOCK, landmark_values=True, **shape, **keys)
    model, tokens = Decoder(config).double(), torch.randint(0, 18, (2, 9 * BLOCK))
    memory = model.new_memory(k=2, mapping="true")
    logits = torch.cat([model(part, memory=memory) for part in tokens.split(BLOCK, 1)], 1)
    torch.testing.assert_close(logits, model(tokens, top_k=2), atol=1e-10, rtol=0)


@pytest.mark.parametrize("setting", [{"fan_out": 2}, {"index": "faiss"}, {"k": 0}])
def test_what_scores_no_block_or_not_all_is_refused(setting):
    with pytest.raises(UserError, match="model.landmark_values=true: every block is scored"):
        Memory(BLOCK, landmark_values=True, **setting)
    with pytest.raises(ValueError, match="landmark_values=: the backend 'triton' does not have it"):
        Memory(BLOCK, landmark_values=True, backend="triton").attend(0, *torch.randn(3, 1, 2, 5, 8))
    memory = Memory(BLOCK, landmark_values=True)
    with pytest.raises(ValueError, match="leave out the context miss token"):
        memory.attend(0, *torch.randn(3, 1, 2, 5, 8), cmt=torch.randn(2, 8))
