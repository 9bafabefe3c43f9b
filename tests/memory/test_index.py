"""Candidates from faiss: the same as a scan where no block is left out, else against the definition."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from landmark.memory import Memory
from landmark.memory import memory as memory_module
from landmark.memory.block_store import BlockStore
from landmark.memory.index import LandmarkIndex, retrieve_candidates
from landmark.memory.retrieval import retrieve
from landmark.memory.settings import GRANULARITIES, INDEX_TYPES, MAPPINGS, TIERS
from landmark.utils.errors import UserError
from tests.memory.test_memory import feed
from tests.memory.test_tiers import texts

faiss = pytest.importorskip("faiss")


@st.composite
def readings(draw):
    return {
        "chunks": draw(st.lists(st.integers(1, 20), min_size=2, max_size=6)),
        "heads": draw(st.sampled_from([(2, 2), (4, 2)])),
        "cmt": draw(st.booleans()),
        "settings": {
            "block_size": draw(st.integers(1, 4)),
            "k": draw(st.integers(0, 4)),
            "granularity": draw(st.sampled_from(GRANULARITIES)),
            "tie_layers": draw(st.sampled_from([(), (1,)])),
            "cutoff": draw(st.sampled_from([0.0, 0.3, 0.8])),
            "mapping": draw(st.sampled_from(MAPPINGS)),
            "tier": draw(st.sampled_from(TIERS)),
        },
        "seed": draw(st.integers(0, 1000)),
    }


@given(readings())
@settings(max_examples=60, deadline=None)
def test_with_all_blocks_as_candidates_it_is_a_scan(reading):
    """Every granularity, mapping, tier and cutoff; grouped heads; chunks that end anywhere."""
    q, k, v, cmt = texts(sum(reading["chunks"]), reading["heads"], seed=reading["seed"])
    cmt = cmt if reading["cmt"] else None
    exact = feed(Memory(**reading["settings"]), q, k, v, reading["chunks"], cmt=cmt)
    memory = Memory(**reading["settings"], index="faiss", index_type="flat", candidates=200)
    torch.testing.assert_close(feed(memory, q, k, v, reading["chunks"], cmt=cmt), exact)


def filled(blocks, heads=2, dim=8, batch=2, seed=0, clusters=None):
    """A store of random landmarks; of some that are alike, where there are clusters."""
    generator = torch.Generator().manual_seed(seed)
    store = BlockStore(None)
    shape = batch, heads, blocks, 2, dim
    keys = torch.randn(shape, generator=generator)
    if clusters is not None:
        centres = torch.randn(clusters, dim, generator=generator)
        keys = 0.2 * keys + centres[torch.randint(0, clusters, shape[:-1], generator=generator)]
    store.add(keys, keys)
    return store


def rotated(queries, heads=4, dim=8, batch=2, slots=3, seed=1):
    return torch.randn(slots, batch, queries, heads, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_few_candidates_by_the_definition(granularity):
    """k=2, three candidates: the blocks that each head and query may choose from, and their weights, in loops."""
    store, queries, k, candidates = filled(12), rotated(5), 2, 3
    ages = retrieve_candidates(
        queries, store, LandmarkIndex("flat", candidates), k=k, granularity=granularity, num_recent=k
    )
    for sample in range(2):
        probability = np.zeros((4, 5, 13))  # by age
        for head in range(4):
            for t in range(5):
                landmarks = store.landmarks[sample, head // 2]
                scores = {a: float(queries[a - 1, sample, t, head] @ landmarks[12 - a]) for a in (1, 2)}
                older = {a: float(queries[2, sample, t, head] @ landmarks[12 - a]) for a in range(3, 13)}
                scores |= dict(sorted(older.items(), key=lambda item: -item[1])[:candidates])
                total = sum(map(math.exp, scores.values()))
                for a, score in scores.items():
                    probability[head, t, a] = math.exp(score) / total
        reduced = {
            "per_token_and_head": probability,
            "per_token_and_group": probability.reshape(2, 2, 5, 13).max(1),
            "per_head": probability.max(1, keepdims=True),
            "per_token": probability.max(0, keepdims=True),
        }[granularity]
        expected = np.sort(np.argsort(reduced, -1)[..., -k:], -1)[..., ::-1]
        np.testing.assert_array_equal(ages[sample].numpy(), expected)


def test_equal_scores_are_taken_by_recency_and_no_block_twice():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, -torch.inf]])
    ages = torch.tensor([[1, 9, 4, 4, 2, 13]])
    from landmark.memory.index import _best

    assert _best(scores, ages, 4).tolist() == [[4, 9, 1, 2]]


def test_the_inverted_file_finds_most_as_it_grows():
    """Two thousand blocks, then nine thousand: lists are made again, blocks between are added; it is approximate."""
    queries, index = rotated(40, slots=5), LandmarkIndex("ivf", 16)
    store = filled(2000, clusters=60)
    kinds = []
    for more in (0, 1000, 1200, 4500):
        if more:
            new = filled(more, clusters=60, seed=more).blocks.keys[..., :1, :].repeat(1, 1, 1, 2, 1)[:, :, :more]
            store.add(new, new)
        ages = retrieve_candidates(queries, store, index, k=4, granularity="per_token_and_head", num_recent=4)
        kinds.append(index._indices[0].nlist)
        scan = retrieve(
            queries, store, k=4, granularity="per_token_and_head", scorer="landmark", tie=False,
            generator=torch.Generator(), num_recent=4,
        )  # fmt: skip
        found = (ages[..., :, None] == scan[..., None, :]).any(-2).float().mean()
        assert found > 0.9
        assert index._indices[0].ntotal == len(store) - 4
    assert kinds == [49, 49, 104, 217]


def test_few_blocks_need_no_lists():
    index = LandmarkIndex("ivf", 16)
    retrieve_candidates(rotated(3, slots=5), filled(300), index, k=4, granularity="per_token", num_recent=4)
    assert isinstance(index._indices[0], faiss.IndexFlat)


@pytest.mark.parametrize("kind", INDEX_TYPES)
def test_a_loaded_memory_is_indexed_anew(tmp_path, kind):
    q, k, v, _ = texts(90)
    memory = Memory(3, k=2, index="faiss", index_type=kind, candidates=4)
    feed(memory, q[:, :, :60], k[:, :, :60], v[:, :, :60], [25, 35])
    memory.save(tmp_path / "book")
    loaded = Memory(3, k=2, index="faiss", index_type=kind, candidates=4, tier="disk")
    loaded.load(tmp_path / "book")
    rest = [x[:, :, 60:] for x in (q, k, v)]
    assert torch.equal(feed(loaded, *rest, [20, 10]), feed(memory, *rest, [20, 10]))


def test_tied_layers_and_short_memories_do_not_use_the_index(monkeypatch):
    searched = []
    monkeypatch.setattr(
        memory_module, "retrieve_candidates", lambda *a, **s: searched.append(1) or retrieve_candidates(*a, **s)
    )
    q, k, v, _ = texts(60)
    feed(Memory(3, k=2, index="faiss"), q, k, v, [20, 20, 20], layer=0)
    feed(Memory(3, k=9, index="faiss"), q, k, v, [20, 16])
    assert searched == []
    feed(Memory(3, k=2, index="faiss"), q, k, v, [20, 20, 20])
    assert len(searched) == 2


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"index": "annoy"}, "memory.index=annoy: must be one of exact, faiss"),
        ({"index": "faiss", "index_type": "hnsw"}, "memory.index_type=hnsw: must be one of flat, ivf"),
        ({"index": "faiss", "max_blocks": 9}, "the index cannot drop blocks, so memory.blocks=9 must be null"),
        ({"index": "faiss", "scorer": "mean_key"}, "retrieval.scorer=mean_key must be landmark"),
        ({"index": "faiss", "candidates": 0}, "memory.candidates=0"),
    ],
)
def test_bad_settings_are_refused(setting, said):
    with pytest.raises(UserError, match=said):
        Memory(3, **setting)


def test_without_faiss_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    Memory(3)
    with pytest.raises(UserError, match=r"pip install 'landmark\[faiss\]'"):
        Memory(3, index="faiss")
