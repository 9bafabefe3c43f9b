"""The Triton kernel that attends to retrieved blocks, interpreted, against the same softmax written out."""

import pytest
import torch

from landmark.memory.reading_kernels import attend_to_retrieved_blocks
from tests.pairs import all_pairs, name_of

SHAPES = all_pairs(
    {
        "kv_heads": [1, 2],
        "group": [1, 2],
        "choosing": ["heads", "kv_heads", "one"],
        "batch": [1, 2],
        "queries": [1, 17],
        "dim": [4, 20],
        "block_size": [1, 5, 50],
        "capacity": [4, 7],
        "dropped": [0, 9],
        "count": [1, 4],
        **{name: [False, True] for name in ("stingy", "in_place", "shared", "local", "weighted", "masked")},
        "alpha": [0.0, 0.5, 1.0],
        "splits": [1, 2, 3],
    }
)


def inputs(shape, dtype):
    generator = torch.Generator().manual_seed(0)

    def normal(*size):
        return torch.randn(*size, dtype=torch.float64, generator=generator).to(dtype)

    batch, kv_heads, queries, dim, capacity = (shape[n] for n in ("batch", "kv_heads", "queries", "dim", "capacity"))
    heads, count = kv_heads * shape["group"], shape["count"]
    sets = {"heads": heads, "kv_heads": kv_heads, "one": 1}[shape["choosing"]], 1 if shape["shared"] else queries
    order = torch.rand(batch, *sets, capacity, generator=generator).argsort(-1)
    ages = 1 + order[..., :count].sort(-1, descending=True).values
    arguments = [
        normal(count + 1 if shape["stingy"] else 1, batch, queries, heads, dim),
        *(normal(batch * kv_heads * capacity, shape["block_size"], dim) for _ in range(2)),
        normal(batch, kv_heads, capacity, dim),
        ages,
    ]
    lse = normal(batch, heads, queries).masked_fill(torch.rand(queries, generator=generator) < 0.1, -torch.inf)
    local = normal(batch, heads, queries, dim), lse
    optional = {"added": capacity + shape["dropped"], "recent": count if shape["stingy"] else 0, "rows": None}
    if not shape["in_place"]:
        optional["rows"] = places(ages, heads, kv_heads, capacity, optional["added"])
        moved = torch.randperm(batch * kv_heads * capacity, generator=generator)
        optional["rows"] = moved[optional["rows"]]
        arguments[1:3] = [torch.empty_like(x).index_copy_(0, moved, x) for x in arguments[1:3]]
    optional["local"] = local if shape["local"] else None
    weight = torch.rand(batch, heads, queries, generator=generator).to(dtype)
    optional["weight"] = weight if shape["weighted"] else None
    selected = torch.rand(batch, heads, queries, generator=generator) < 0.7
    optional["selected"] = selected if shape["masked"] else None
    optional |= {"alpha": shape.get("alpha", 0.0), "splits": shape.get("splits")}
    return arguments, optional


def places(ages, heads, kv_heads, capacity, added):
    """Where the blocks are in (B, H_kv, capacity), flattened: (B, H, T or 1, q)."""
    ages = ages.repeat_interleave(heads // ages.shape[1], 1)
    batch, head = torch.arange(len(ages))[:, None, None, None], torch.arange(heads)[:, None, None]
    return (batch * kv_heads + head * kv_heads // heads) * capacity + (added - ages) % capacity


def written_out(arguments, added, recent, rows, local, weight, selected, alpha, splits):
    rotated, keys, values, landmarks, ages = arguments
    lags, batch, queries, heads, dim = rotated.shape
    here = places(ages, heads, *landmarks.shape[1:3], added)
    rows = here if rows is None else rows
    lag = torch.ones_like(ages)
    if recent:  # stingy: older blocks side by side from the furthest slot on, recent ones at their own
        lag = torch.where(
            ages > recent, lags - torch.arange(ages.shape[-1]), ages.shape[-1] - torch.arange(ages.shape[-1])
        )
    lag = lag.repeat_interleave(heads // ages.shape[1], 1)
    out = rotated.new_zeros(batch, heads, queries, dim)
    for b in range(batch):
        for h in range(heads):
            for t in range(queries):
                if selected is not None and not selected[b, h, t]:
                    continue
                gates, outs = [], []
                chosen = [x[b, h, 0 if x.shape[2] == 1 else t].tolist() for x in (rows, here, lag)]
                for row, place, of_block in zip(*chosen, strict=True):
                    q = rotated[of_block - 1, b, t, h]
                    scores, gate = keys[row] @ q, q @ landmarks.flatten(0, 2)[place]
                    gates.append(gate + alpha * scores.logsumexp(0))
                    outs.append(scores.softmax(0) @ values[row])
                if local is not None:
                    gates.append(local[1][b, h, t])
                    outs.append(local[0][b, h, t])
                out[b, h, t] = torch.stack(gates).softmax(0) @ torch.stack(outs)
                if weight is not None:
                    out[b, h, t] *= weight[b, h, t]
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_any_shape(shape):
    arguments, optional = inputs(shape, torch.float64)
    exact = written_out(arguments, **optional)
    arguments, optional = inputs(shape, torch.float32)
    ours = attend_to_retrieved_blocks(*arguments, **optional)
    torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=1e-5)
    counted = optional | {"added": torch.tensor(optional["added"])}
    assert torch.equal(attend_to_retrieved_blocks(*arguments, **counted), ours)


SHAPE = {"batch": 1, "queries": 66, "kv_heads": 1, "group": 2, "dim": 16, "block_size": 63, "capacity": 5, "count": 4}
SHAPE |= {
    "choosing": "heads",
    "dropped": 3,
    "stingy": True,
    "in_place": True,
    "local": True,
    "weighted": True,
    "masked": True,
}


@pytest.mark.parametrize("shared", [False, True])
def test_half_precision_and_every_number_written(shared):
    shape = SHAPE | {"shared": shared}
    arguments, optional = inputs(shape, torch.float16)
    exact = written_out([x.double() if x.is_floating_point() else x for x in arguments], **_double(optional))
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out = attend_to_retrieved_blocks(*arguments, **optional)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(out.double(), exact, atol=4e-3, rtol=4e-3)


def _double(optional):
    out, lse = optional["local"]
    return optional | {"local": (out.double(), lse.double()), "weight": optional["weight"].double()}


def test_strided_keys_and_values():
    arguments, optional = inputs(SHAPE | {"shared": True}, torch.float32)
    expected = attend_to_retrieved_blocks(*arguments, **optional)
    rotated, keys, values = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in arguments[:3])
    torch.testing.assert_close(attend_to_retrieved_blocks(rotated, keys, values, *arguments[3:], **optional), expected)
