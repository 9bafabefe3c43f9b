"""The Triton kernel that scores blocks, interpreted, against the same sums written out."""

import pytest
import torch

from landmark.memory.select.scores_kernels import score_blocks
from tests.pairs import all_pairs, name_of

SHAPES = all_pairs(
    {
        "kv_heads": [1, 2],
        "group": [1, 3, 20],
        "alone": [False, True],
        "batch": [1, 2],
        "queries": [1, 9],
        "dim": [4, 20],
        "block_size": [1, 5, 50],
        "capacity": [4, 7],
        "dropped": [0, 9],
        "count": [1, 4],
        "slots": [1, 3],
        "strided": [False, True],
        "dtype": [torch.float32, torch.float16, torch.bfloat16],
    }
)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_any_shape(shape):
    generator = torch.Generator().manual_seed(0)
    batch, kv_heads, queries, dim, capacity = (shape[n] for n in ("batch", "kv_heads", "queries", "dim", "capacity"))
    heads, count, added = kv_heads * shape["group"], shape["count"], capacity + shape["dropped"]
    sets = heads if shape["alone"] else kv_heads
    rotated = torch.randn(shape["slots"], batch, queries, heads, dim, generator=generator).to(shape["dtype"])
    size = batch * kv_heads * capacity, shape["block_size"], dim
    keys = torch.randn(*size, generator=generator).to(shape["dtype"])
    landmarks = torch.randn(batch, kv_heads, capacity, dim, generator=generator)
    ages = 1 + torch.rand(batch, sets, queries, capacity, generator=generator).argsort(-1)[..., :count]
    lags = torch.randint(1, shape["slots"] + 1, ages.shape, generator=generator)
    if shape["strided"]:
        rotated, keys = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (rotated, keys))
    expected = torch.empty(batch, heads, queries, count, dtype=torch.float64)
    for b, h, t, r in torch.cartesian_prod(*map(torch.arange, expected.shape)).tolist():
        own, kv = h * sets // heads, h * kv_heads // heads
        age, lag = ages[b, own, t, r], lags[b, own, t, r]
        row = (added - age) % capacity
        q = rotated[lag - 1, b, t, h].double()
        expected[b, h, t, r] = (keys[(b * kv_heads + kv) * capacity + row].double() @ q).logsumexp(0)
        expected[b, h, t, r] += landmarks[b, kv, row].double() @ q
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        ours = score_blocks(rotated, keys, landmarks, ages, lags, added=added)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=1e-5)
