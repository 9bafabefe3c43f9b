"""Candidates from faiss: the same as a scan where no block is left out, else against the definition."""

import sys

import pytest
import torch

from landmark.attention import ContextMiss, Grouped, Scoring
from landmark.attention.rotary import RotaryTable
from landmark.memory.layer import LayerMemory, Question, Stingy
from landmark.memory.select import Best, Faiss, SecondLook
from landmark.memory.select.scores import best_in_order
from landmark.memory.settings import MAPPINGS, TIERS
from landmark.memory.store import BlockStore
from landmark.utils.errors import UserError
from tests.memory.reading import feed, new_memory, texts
from tests.pairs import all_pairs, name_of

faiss = pytest.importorskip("faiss")


CASES = all_pairs(
    {
        "chunks": [(20, 20, 17), (3, 19, 1, 1, 14)],
        "heads": [(2, 2), (4, 2)],
        "cutoff": [None, 0.0, 0.5],
        "block_size": [1, 4],
        "k": [0, 2, 4],
        "layer": [0, 1],
        "mapping": MAPPINGS,
        "tier": TIERS,
        "softcap": [None, 1.5],
        "second look": [None, 5],
    }
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_with_all_blocks_as_candidates_it_is_a_scan(case):
    q, k, v, cmt = texts(sum(case["chunks"]), case["heads"])
    names = "block_size", "k", "mapping", "tier"
    settings = {name: case[name] for name in names} | {"cutoff": case["cutoff"] or 0.0, "rerank": case["second look"]}
    settings["scoring"] = Scoring(None, case["softcap"])
    reading = {"layer": case["layer"], "extra": None if case["cutoff"] is None else ContextMiss(cmt)}
    exact = feed(new_memory(**settings), q, k, v, case["chunks"], **reading)
    memory, look = new_memory(**settings), case["second look"]
    memory.select = Faiss(200, "flat") if look is None else SecondLook(look, Faiss(200, "flat"))
    torch.testing.assert_close(feed(memory, q, k, v, case["chunks"], **reading), exact)


def filled(blocks, heads=2, dim=8, batch=2, seed=0, clusters=None):
    """A store of random landmarks; of some that are alike, where there are clusters."""
    generator = torch.Generator().manual_seed(seed)
    store = BlockStore()
    shape = batch, heads, blocks, 2, dim
    keys = torch.randn(shape, generator=generator)
    if clusters is not None:
        centres = torch.randn(clusters, dim, generator=generator)
        keys = 0.2 * keys + centres[torch.randint(0, clusters, shape[:-1], generator=generator)]
    store.add(keys, keys)
    return store


def question(store, queries, k, heads=4, dim=8, batch=2, seed=1):
    """What random queries ask, not rotated, so that they are the same at every lag."""
    q = torch.randn(batch, heads, queries, dim, generator=torch.Generator().manual_seed(seed))
    of_queries = {"q": q, "start": 0, "rotary": RotaryTable(torch.zeros(dim // 2))}
    of_queries["lags"] = Stingy().lags(store.added, k, 2)
    scoring = {"gate": Grouped(), "scale": 1.0, "softcap": None, "backend": "blockwise"}
    return q, Question(layer=1, position=0, state=LayerMemory(store), block_size=1, **of_queries, **scoring)


def test_few_candidates_by_the_definition():
    """k=2: the best of the last two blocks and of the three best older ones, in loops."""
    store = filled(12)
    queries, asked = question(store, 5, 2)
    ages = Faiss(3, "flat").choose(asked, 2)
    for sample, head, t in torch.cartesian_prod(*map(torch.arange, (2, 4, 5))).tolist():
        scores = {a: float(queries[sample, head, t] @ store.landmarks[sample, head // 2, 12 - a]) for a in range(1, 13)}
        older = sorted(range(3, 13), key=lambda a: -scores[a])[:3]
        expected = sorted(sorted([1, 2, *older], key=lambda a: -scores[a])[:2], reverse=True)
        assert ages[sample, head, t].tolist() == expected
    scores, ages = torch.tensor([[1.0, 0.0, 2.0, 2.0, -torch.inf]]), torch.tensor([[1, 2, 4, 9, 13]])
    for count, best in ((1, [[4]]), (3, [[9, 4, 1]])):  # equal scores are taken by recency
        assert best_in_order(scores, ages, count).tolist() == best


def test_the_inverted_file_finds_most_as_it_grows():
    """Two thousand blocks, then nine thousand: lists are made again, blocks between are added; it is approximate. Few
    blocks need no lists."""
    (_, asked), few = question(filled(300), 3, 4), Faiss()
    few.choose(asked, 4)
    assert isinstance(few.indices[asked.store]._indices[0], faiss.IndexFlat)
    store, select, kinds = filled(2000, clusters=60), Faiss(16), []
    for more in (0, 1000, 1200, 4500):
        if more:
            new = filled(more, clusters=60, seed=more).blocks.keys[..., :1, :].repeat(1, 1, 1, 2, 1)[:, :, :more]
            store.add(new, new)
        _, asked = question(store, 40, 4)
        ages, scan = select.choose(asked, 4), Best().choose(asked, 4)
        (index,) = select.indices[store]._indices[:1]
        kinds.append(index.nlist)
        found = (ages[..., :, None] == scan[..., None, :]).any(-2).float().mean()
        assert found > 0.9
        assert index.ntotal == len(store) - 4
    assert kinds == [49, 49, 104, 217]


def test_a_loaded_memory_and_reordered_samples_are_indexed_anew(tmp_path):
    (q, k, v, _), swapped = texts(90), torch.tensor([1, 0])
    memory = new_memory(k=2, index="faiss")
    feed(memory, q[:, :, :60], k[:, :, :60], v[:, :, :60], [25, 35])
    memory.save(tmp_path / "book")
    loaded = new_memory(k=2, index="faiss", tier="disk")
    loaded.load(tmp_path / "book")
    reordered, rest = memory.select_samples(swapped), [x[:, :, 60:] for x in (q, k, v)]
    expected = feed(memory, *rest, [20, 10])
    assert torch.equal(feed(loaded, *rest, [20, 10]), expected)
    assert torch.equal(feed(reordered, *(x[swapped] for x in rest), [20, 10]), expected[swapped])


def test_without_faiss_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    new_memory()
    with pytest.raises(UserError, match=r"pip install 'landmark\[faiss\]'"):
        new_memory(index="faiss")
