"""The Triton kernel that attends to pending tokens, interpreted, against the same in plain PyTorch."""

import pytest
import torch

from landmark.attention.rotary import rotary_factors, rotate
from landmark.memory.step_kernels import attend_to_pending_tokens


@pytest.mark.parametrize("pending", [0, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "lags", "dtype"),
    [(2, 2, 8, 0, torch.float32), (4, 2, 20, 3, torch.float32), (2, 1, 16, 2, torch.float16)],
)
def test_it_attends_rotates_and_writes(pending, tokens, heads, kv_heads, dim, lags, dtype):
    """What is in the buffer's other places, here NaN, is not read; nothing attends to the landmark, the sixth token."""
    width, scale = 6, 0.3
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, pending + tokens, n, dim, generator=generator).to(dtype).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    )
    keys, values = torch.full((2, 2, kv_heads, width, dim), torch.nan, dtype=dtype)
    keys[:, :, :pending], values[:, :, :pending] = k[:, :, :pending], v[:, :, :pending]
    factors = rotary_factors(torch.arange((lags + 1) * width), dim, 10000.0, torch.float32)
    buffers = {"keys": keys, "values": values, "pending": torch.tensor(pending), "factors": torch.view_as_real(factors)}
    new = (x[:, :, pending:] for x in (q, k, v))
    ours = attend_to_pending_tokens(*new, **buffers, scale=scale, lags=lags)

    own = torch.arange(pending, pending + tokens)
    for buffer, x in ((keys, k), (values, v)):
        assert torch.equal(buffer[:, :, : pending + tokens], x)
        assert buffer[:, :, pending + tokens :].isnan().all()
    q, k, v = q[:, :, pending:].double(), k.double(), v.double()
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = rotate(q, factors[own]) @ rotate(k, factors[: pending + tokens]).mT * scale
    place = torch.arange(pending + tokens)
    scores = scores.masked_fill((place > own[:, None]) | (place == width - 1), -torch.inf)
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(ours.out.double(), scores.softmax(-1) @ v, **tolerance)
    torch.testing.assert_close(ours.lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert len(ours.exact) == lags
    for lag in range(1, lags + 1):
        rotated = rotate(q * scale, factors[own + lag * width]).transpose(1, 2)
        torch.testing.assert_close(ours.exact[lag - 1].double(), rotated, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(ours.rounded[lag - 1], ours.exact[lag - 1].to(dtype), rtol=0, atol=0)
