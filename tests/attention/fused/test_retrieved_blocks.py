"""The Triton kernel that attends to retrieved blocks, interpreted, against the same softmax written out."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from landmark.attention.fused.retrieved_blocks import attend_to_retrieved_blocks


@st.composite
def shapes(draw):
    queries = draw(st.integers(1, 30))
    return {
        "lags": draw(st.integers(1, 3)),
        "batch": draw(st.integers(1, 2)),
        "queries": queries,
        "heads": draw(st.integers(1, 2)),
        "dim": draw(st.sampled_from([4, 16, 20])),
        "block_size": draw(st.sampled_from([1, 5, 16, 50])),
        "stored": draw(st.integers(1, 5)),
        "count": draw(st.integers(1, 4)),
        "shared": draw(st.booleans()),
        "local": draw(st.booleans()),
        "weighted": draw(st.booleans()),
        "masked": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def inputs(shape, dtype):
    generator = torch.Generator().manual_seed(shape["seed"])

    def normal(*size):
        return torch.randn(*size, dtype=torch.float64, generator=generator).to(dtype)

    def index(high):
        return torch.randint(0, high, (batch, heads, sets, shape["count"]), generator=generator)

    batch, heads, queries, dim = (shape[name] for name in ("batch", "heads", "queries", "dim"))
    sets = 1 if shape["shared"] else queries
    stored = shape["stored"]
    arguments = [
        normal(shape["lags"], batch, queries, heads, dim),
        *(normal(stored, shape["block_size"], dim) for _ in range(2)),
        normal(stored + 2, dim),
        *(index(stored), index(stored + 2), 1 + index(shape["lags"])),
    ]
    lse = normal(batch, heads, queries).masked_fill(torch.rand(queries, generator=generator) < 0.1, -torch.inf)
    local = normal(batch, heads, queries, dim), lse
    optional = {"local": local if shape["local"] else None}
    weight = torch.rand(batch, heads, queries, generator=generator).to(dtype)
    optional["weight"] = weight if shape["weighted"] else None
    selected = torch.rand(batch, heads, queries, generator=generator) < 0.7
    optional["selected"] = selected if shape["masked"] else None
    return arguments, optional


def written_out(arguments, local, weight, selected):
    rotated, keys, values, landmarks, rows, places, lags = arguments
    _, batch, queries, heads, dim = rotated.shape
    out = rotated.new_zeros(batch, heads, queries, dim)
    for b in range(batch):
        for h in range(heads):
            for t in range(queries):
                if selected is not None and not selected[b, h, t]:
                    continue
                chosen = [x[b, h, 0 if x.shape[2] == 1 else t].tolist() for x in (rows, places, lags)]
                gates, outs = [], []
                for row, place, lag in zip(*chosen, strict=True):
                    q = rotated[lag - 1, b, t, h]
                    gates.append(q @ landmarks[place])
                    outs.append((keys[row] @ q).softmax(0) @ values[row])
                if local is not None:
                    gates.append(local[1][b, h, t])
                    outs.append(local[0][b, h, t])
                out[b, h, t] = torch.stack(gates).softmax(0) @ torch.stack(outs)
                if weight is not None:
                    out[b, h, t] *= weight[b, h, t]
    return out


@given(shapes())
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_shape(shape):
    exact = written_out(*(lambda x: (x[0], *x[1].values()))(inputs(shape, torch.float64)))
    arguments, optional = inputs(shape, torch.float32)
    torch.testing.assert_close(attend_to_retrieved_blocks(*arguments, **optional).double(), exact, atol=2e-5, rtol=1e-5)


SHAPE = {"lags": 3, "batch": 1, "queries": 70, "heads": 2, "dim": 16, "block_size": 63, "stored": 5, "count": 4}
SHAPE |= {"local": True, "weighted": True, "masked": True, "seed": 0}


@pytest.mark.parametrize("shared", [False, True])
def test_half_precision_and_every_number_written(shared):
    shape = SHAPE | {"shared": shared}
    arguments, optional = inputs(shape, torch.float16)
    exact = written_out([x.double() if x.is_floating_point() else x for x in arguments], *_double(optional))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out = attend_to_retrieved_blocks(*arguments, **optional)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out.double(), exact, atol=4e-3, rtol=4e-3)


def _double(optional):
    out, lse = optional["local"]
    return (out.double(), lse.double()), optional["weight"].double(), optional["selected"]


def test_strided_keys_and_values():
    arguments, optional = inputs(SHAPE | {"shared": True}, torch.float32)
    expected = attend_to_retrieved_blocks(*arguments, **optional)
    rotated, keys, values = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in arguments[:3])
    torch.testing.assert_close(attend_to_retrieved_blocks(rotated, keys, values, *arguments[3:], **optional), expected)
