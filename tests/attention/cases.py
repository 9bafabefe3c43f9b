"""Inputs of landmark attention by a case of few words, and what a backend makes of them."""

import torch

from landmark.attention import ContextMiss, Grouped, Packed, Scoring, Sinks, Window, landmark_attention
from landmark.utils.window_batch import most_blocks

CASE = {"block_size": 6, "queries": 40, "prefix": 9, "lengths": None, "heads": (2, 1), "dim": 4, "alpha": 0.0}
CASE |= {"phase": "on a landmark", "extra": None, "scoring": (None, None), "top_k": None}


def leaves_of(case, dtype=torch.float64, compute=None):
    """Queries, keys, values and the extra place, rounded to `dtype` and computed as `compute`, by name. lengths: of
    packed documents; None: there are two windows."""
    case, generator = CASE | case, torch.Generator().manual_seed(0)
    (heads, kv_heads), lengths, dim = case["heads"], case["lengths"], case["dim"]
    batch, queries = (2, case["queries"]) if lengths is None else (1, sum(lengths))
    keys = case["prefix"] + queries
    shapes = {"q": (batch, heads, queries, dim), "k": (batch, kv_heads, keys, dim), "v": (batch, kv_heads, keys, dim)}
    if case["extra"] is not None:
        shapes["extra"] = (heads,) if case["extra"] == "sinks" else (kv_heads, dim)
    drawn = {name: torch.randn(*s, dtype=torch.float64, generator=generator).to(dtype) for name, s in shapes.items()}
    return {name: x.to(compute or dtype).requires_grad_() for name, x in drawn.items()}


def arguments(case, leaves):
    case = CASE | case
    block_size, lengths, extra = case["block_size"], case["lengths"], case["extra"]
    phases = {"cut": [block_size // 2, 0, 1, 1], "on a landmark": [block_size, 1, 1, 0]}
    samples, length = (2, case["prefix"] + case["queries"]) if lengths is None else (len(lengths), max(lengths))
    phase = None if case["phase"] is None else torch.tensor(phases[case["phase"]][:samples])
    layout = Window(block_size, phase, case["prefix"])
    if lengths is not None:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        layout = Packed(block_size, phase, ends)
    if extra == "sinks":
        extra = Sinks(leaves["extra"])
    elif extra is not None:
        drawn = torch.rand(samples, most_blocks(length, block_size), generator=torch.Generator().manual_seed(1))
        extra = ContextMiss(leaves["extra"], drawn < 0.5 if extra == "controlled" else None)
    options = {"gate": Grouped(case["alpha"]), "scoring": Scoring(*case["scoring"]), "top_k": case["top_k"]}
    return {"layout": layout, "extra": extra, **options}


def attend(case, leaves, backend, scale=1.0):
    """Output and log-sum-exp. scale: factor of queries and keys."""
    q, k, v = (leaves[name] for name in "qkv")
    return landmark_attention(q * scale, k * scale, v, **arguments(case, leaves), backend=backend)


def run(case, backend, dtype=torch.float64, compute=None, scale=1.0):
    leaves, generator = leaves_of(case, dtype, compute), torch.Generator().manual_seed(2)
    out, lse = attend(case, leaves, backend, scale)
    of_out, of_lse = (torch.randn(x.shape, dtype=torch.float64, generator=generator).to(dtype) for x in (out, lse))
    total = (out * of_out).sum() + (lse.masked_fill(lse.isinf(), 0.0) * of_lse).sum()
    gradients = torch.autograd.grad(total, leaves.values(), allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}
