"""A memory with the fused kernel, interpreted, gives the numbers of the other backends, on every tier."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from landmark.memory import Memory
from tests.memory.test_memory import feed, readings


def read(reading, tier, backend, dtype=torch.float32):
    generator = torch.Generator().manual_seed(reading["seed"])
    heads, kv_heads = reading["heads"]
    total = sum(reading["chunks"])
    q = torch.randn(2, heads, total, 4, generator=generator).to(dtype)
    k, v = (torch.randn(2, kv_heads, total, 4, generator=generator).to(dtype) for _ in range(2))
    cmt = torch.randn(kv_heads, 4, generator=generator).to(dtype) if reading["cmt"] else None
    names = ("max_blocks", "k", "granularity", "cutoff", "mapping", "key_offset", "landmark_key")
    memory = Memory(
        reading["block_size"],
        **{name: reading[name] for name in names if name in reading},
        tie_layers=(1,) if reading["tie"] else (),
        tier=tier,
        backend=backend,
    )
    return feed(memory, q, k, v, reading["chunks"], cmt=cmt), memory.stats


@given(readings(), st.sampled_from(["device", "cpu", "disk"]))
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_one_kernel_reads_what_the_other_backends_do(reading, tier):
    ours, stats = read(reading, tier, "triton")
    expected, others = read(reading, "device", "blockwise")
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    for name in ("searches", "searches_skipped", "lookups", "retrievals", "blocks_retrieved"):
        assert stats[name] == others[name], name


def test_the_type_of_the_queries_decides_whether_kernels_run(monkeypatch):
    """Not that of the scores, float32: larger blocks would not fit into a GPU, and nothing would say why."""
    asked, backend = [], Memory._backend
    monkeypatch.setattr(
        Memory, "_backend", lambda self, like, **o: asked.append(like.dtype) or backend(self, like, **o)
    )
    memory = Memory(5, k=2, backend="triton")
    q, k, v = torch.randn(3, 1, 2, 40, 16).half()
    feed(memory, q, k, v, [30, 10])
    assert set(asked) == {torch.float16}


@pytest.mark.parametrize("granularity", ["per_head", "per_token_and_head"])
def test_half_precision(granularity):
    reading = {"chunks": [30, 40, 1, 1], "block_size": 10, "k": 2, "max_blocks": None, "granularity": granularity}
    reading |= {"heads": (4, 2), "tie": False, "cmt": False, "cutoff": 0.0, "mapping": "stingy", "seed": 0}
    ours, _ = read(reading, "device", "triton", torch.float16)
    expected, _ = read(reading, "device", "reference", torch.float16)
    torch.testing.assert_close(ours, expected, atol=4e-3, rtol=4e-3)
