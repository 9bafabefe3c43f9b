"""A memory with the fused kernels, interpreted, gives the numbers of the other backends, on every tier."""

import pytest
import torch

from landmark.attention import ContextMiss, Grouped
from landmark.attention.keys import Keys
from landmark.memory import memory as memory_module
from landmark.memory.settings import GRANULARITIES, MAPPINGS, TIERS
from tests.memory.reading import feed, new_memory, texts
from tests.pairs import all_pairs, name_of

CASES = all_pairs(
    {
        "chunks": [(11, 6), (7, 1, 5)],
        "heads": [(2, 2), (4, 2)],
        "cutoff": [None, 0.0, 0.5],
        "block_size": [1, 3],
        "k": [0, 2, 3],
        "max_blocks": [None, 4],
        "granularity": GRANULARITIES,
        "layer": [0, 1],
        "mapping": MAPPINGS,
        "tier": TIERS,
        "second look": [None, 5],
        "keys": [(0.0, "token"), (0.5, "mean")],
        "alpha": [0.0, 0.5, 1.0],
    },
    lambda case: case["second look"] is None or case["granularity"].startswith("per_token_and"),
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_one_kernel_reads_what_the_other_backends_do(case):
    q, k, v, cmt = texts(sum(case["chunks"]), case["heads"], batch=1)
    names = "block_size", "k", "max_blocks", "granularity", "mapping"
    settings = {name: case[name] for name in names} | {"cutoff": case["cutoff"] or 0.0, "rerank": case["second look"]}
    settings |= {"keys": Keys(*case["keys"]), "gate": Grouped(case["alpha"])}
    reading = {"layer": case["layer"], "extra": None if case["cutoff"] is None else ContextMiss(cmt)}
    memory, other = new_memory(**settings, tier=case["tier"], backend="triton"), new_memory(**settings)
    ours, expected = (feed(each, q, k, v, case["chunks"], **reading) for each in (memory, other))
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    for name in ("searches", "searches_skipped", "lookups", "retrievals", "blocks_retrieved"):
        assert memory.stats[name] == other.stats[name], name


def test_the_type_of_the_queries_decides_whether_kernels_run(monkeypatch):
    """Not that of the scores, float32: larger blocks would not fit into a GPU, and nothing would say why."""
    asked, chosen = [], memory_module.backend_for
    monkeypatch.setattr(
        memory_module, "backend_for", lambda name, like, *rest: asked.append(like.dtype) or chosen(name, like, *rest)
    )
    feed(new_memory(5, k=2, backend="triton"), *torch.randn(3, 1, 1, 20, 16).half(), [14, 6])
    assert set(asked) == {torch.float16}


@pytest.mark.parametrize("granularity", ["per_head", "per_token_and_head"])
def test_half_precision(granularity):
    q, k, v, _ = texts(36, (4, 2), batch=1, dtype=torch.float16)
    ours, expected = (
        feed(new_memory(5, k=2, granularity=granularity, backend=backend), q, k, v, [24, 11, 1])
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(ours, expected, atol=4e-3, rtol=4e-3)
