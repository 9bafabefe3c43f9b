"""Blocks on the device, in the CPU's memory and on disk, and an index of them: equal results, and what that costs."""

import errno
import os

import numpy as np
import pytest
import torch

from landmark.attention import ContextMiss, Grouped, Scoring
from landmark.attention.keys import Keys
from landmark.attention.rotary import RotaryTable
from landmark.memory.landmarks.block_store import ROWS, SPARE, BlockStore
from landmark.memory.landmarks.layer import LayerMemory, Question, Stingy
from landmark.memory.landmarks.select import Best, Faiss, SecondLook
from landmark.memory.landmarks.select.scores import best_in_order
from landmark.memory.landmarks.settings import GRANULARITIES
from landmark.memory.tiers import FetchedBlocks, Store, TierCounts
from landmark.utils.constants import MAPPINGS, TIERS
from landmark.utils.errors import UserError
from tests.memory.reading import feed, new_memory, texts
from tests.pairs import all_pairs, name_of

OPTIONS = {
    "tier": ["cpu", "disk"],
    "cache": [1, 3, 9],
    "chunks": [(20, 20, 20), (3, 19, 1, 1, 14)],
    "heads": [(2, 2), (4, 2)],
    "cutoff": [None, 0.0, 0.5],
    "block_size": [1, 4],
    "k": [0, 2, 4],
    "max_blocks": [None, 4, 7],
    "granularity": GRANULARITIES,
    "scorer": ["landmark", "recent", "random", "mean_key", "second look"],
    "layer": [0, 1],
    "mapping": MAPPINGS,
    "dtype": [torch.float32, torch.bfloat16, torch.float64],
    "softcap": [None, 1.5],
    "index": ["exact"],
}
OF_FAISS = {"tier": TIERS, "max_blocks": [None], "granularity": ["per_token_and_head"], "dtype": [torch.float32]}
OF_FAISS |= {"scorer": ["landmark", "second look"], "index": ["faiss"]}
ALONE = ("second look", "recent")  # for each query and head
CASES = all_pairs(OPTIONS, lambda case: case["scorer"] not in ALONE or case["granularity"] == "per_token_and_head")
CASES += all_pairs(OPTIONS | OF_FAISS)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_tier_gives_the_same_bits(case):
    """An index of faiss with all blocks as candidates gives the same but for rounding."""
    q, k, v, cmt = texts(sum(case["chunks"]), case["heads"], dtype=case["dtype"])
    names = "block_size", "k", "max_blocks", "granularity", "mapping"
    settings = {name: case[name] for name in names} | {"cutoff": case["cutoff"] or 0.0}
    settings["scoring"] = Scoring(None, case["softcap"])
    settings |= {"rerank": 5} if case["scorer"] == "second look" else {"scorer": case["scorer"]}
    reading = {"layer": case["layer"], "extra": None if case["cutoff"] is None else ContextMiss(cmt)}
    on_device, memory = new_memory(**settings), new_memory(**settings, tier=case["tier"], cache=case["cache"])
    if case["index"] == "faiss":
        pytest.importorskip("faiss")
        candidates = Faiss(200)
        memory.select = candidates if case["scorer"] == "landmark" else SecondLook(5, candidates)
    expected, out = (feed(each, q, k, v, case["chunks"], **reading) for each in (on_device, memory))
    tolerance = {"atol": 0, "rtol": 0} if case["index"] == "exact" else {}
    torch.testing.assert_close(out, expected, **tolerance)
    counted, here = on_device.stats, memory.stats
    same = [key for key in counted if not key.endswith("bytes_kept") and not key.startswith("seconds")]
    assert [here[key] for key in same] == [counted[key] for key in same]
    if case["tier"] != "device":
        assert (here["bytes_moved"] > 0) == (here["cache_misses"] > 0) == (counted["lookups"] > 0)


def test_counts_of_hits_misses_and_bytes():
    """Two heads read the last two blocks of ten tokens; what a chunk has fetched, the next finds."""
    q, k, v, _ = texts(48, (2, 2), batch=1)
    memory = new_memory(10, k=2, scorer="recent", tier="disk", cache=2)
    feed(memory, q, k, v, [33])
    assert memory.stats["cache_misses"] == 0, "a chunk retrieves nothing of itself"
    for start, stop, hits, misses in ((33, 38, 0, 4), (38, 43, 4, 4), (43, 45, 8, 4), (45, 48, 10, 6)):
        memory.attend(1, *(x[:, :, start:stop] for x in (q, k, v)))
        memory.commit()
        stats = memory.stats
        assert (stats["cache_hits"], stats["cache_misses"]) == (hits, misses)
        assert stats["bytes_moved"] == misses * 2 * 10 * 4 * 4
    block = 2 * 10 * 4 * 4  # bytes of a block of one head
    assert stats["bytes_kept"] == 64 * 2 * 4 * 4 + 2 * 2 * block + 4 * 2 * block, "landmarks, the cache, and the file"
    assert "cache_hits" not in new_memory(10).stats


def rows_of(places, width):
    """Stands for a slower tier: the block at a place is the number of the place, everywhere."""

    def read(at, out):
        places.extend(at.tolist())
        return out.copy_(at[:, None].expand(-1, width))

    return read


def test_the_least_recently_used_block_is_dropped_first():
    """Of fetches, the places asked for and those that are not in the cache; an int: the block is overwritten. Where one
    needs more than there is room for, what is missing is read past the cache."""
    cache, counts = FetchedBlocks(3, torch.zeros(1, 1, 1, 2, 2)), TierCounts()
    cache.reserve(10)
    fetches = [((1, 2, 1), [1, 2]), ((3,), [3]), ((2, 3), []), ((4,), [4]), ((2, 3, 4), []), ((1,), [1])]
    fetches += [((5, 6, 1), [5, 6]), (5, []), ((1, 5), [5]), ((1, 5, 7, 8), [7, 8]), ((1, 5), [])]
    for places, missing in fetches:
        if isinstance(places, int):
            cache.forget(places, places + 2)
            continue
        asked = []
        keys, values, rows = cache.fetch(np.array(places), rows_of(asked, 8), counts)
        assert keys[rows].flatten(1).unique(dim=1).flatten().tolist() == list(places)
        assert torch.equal(keys[rows], values[rows])
        assert sorted(asked) == missing
    assert (counts.cache_hits, counts.cache_misses) == (11, 10)


@pytest.mark.parametrize("tier", ["device", "cpu"])
@pytest.mark.parametrize("max_blocks", [None, 700, 5000])
def test_a_store_reserves_little_more_than_it_holds_and_no_more_where_it_knows_what_comes(max_blocks, tier):
    store, told = (BlockStore(Store(max_blocks, tier, cache=1)) for _ in range(2))
    stored = torch.randn(1, 2, 1000, 4, 2, generator=torch.Generator().manual_seed(0))
    told.reserve(1000, stored[..., 1:, :])
    for part in stored.split(3, 2):
        for each in (store, told):
            each.add(part, part + 1)
        assert store.capacity <= len(store) * (1 + 1 / SPARE) + ROWS
    kept = min(max_blocks or 1000, 1000)
    assert told.capacity == len(told) == kept
    rows = store.rows(torch.arange(kept, 0, -1))
    fetched = store.fetch(torch.cat([rows, rows + store.capacity]))
    keys, values = (x[fetched.rows].unflatten(0, (2, -1)) for x in fetched[:2])
    assert torch.equal(keys, stored[0, :, -kept:, :-1])
    assert torch.equal(values, stored[0, :, -kept:, :-1] + 1)
    assert torch.equal(store.landmarks[0][:, rows], stored[0, :, -kept:, -1])
    told.add(stored[:, :, :1], stored[:, :, :1] + 1)  # one that it did not know of
    assert max_blocks == 700 or kept < told.capacity <= (kept + 1) * (1 + 1 / SPARE) + ROWS


def test_what_the_disk_refuses_says_where(tmp_path, monkeypatch):
    """A full disk, and that files have no name, is in test_saving.py."""

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    q, k, v, _ = texts(40)
    with pytest.raises(UserError, match="memory.folder=.*nowhere: cannot write a file there"):
        feed(new_memory(tier="disk", folder=tmp_path / "nowhere"), q, k, v, [20, 20])
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(UserError, match=f"memory.folder={tmp_path}: cannot write a file there"):
        feed(new_memory(tier="disk", folder=tmp_path), q, k, v, [20, 20])
    assert list(tmp_path.iterdir()) == []


# ---- candidates from faiss


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss")


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


def test_few_candidates_by_the_definition(faiss):
    """k=2: the best of the last two blocks and of the three best older ones, in loops."""
    store = filled(12)
    queries, asked = question(store, 5, 2)
    ages = Faiss(3).choose(asked, 2)
    for sample, head, t in torch.cartesian_prod(*map(torch.arange, (2, 4, 5))).tolist():
        scores = {a: float(queries[sample, head, t] @ store.landmarks[sample, head // 2, 12 - a]) for a in range(1, 13)}
        older = sorted(range(3, 13), key=lambda a: -scores[a])[:3]
        expected = sorted(sorted([1, 2, *older], key=lambda a: -scores[a])[:2], reverse=True)
        assert ages[sample, head, t].tolist() == expected
    scores, ages = torch.tensor([[1.0, 0.0, 2.0, 2.0, -torch.inf]]), torch.tensor([[1, 2, 4, 9, 13]])
    for count, best in ((1, [[4]]), (3, [[9, 4, 1]])):  # equal scores are taken by recency
        assert best_in_order(scores, ages, count).tolist() == best


def test_the_inverted_file_finds_most_as_it_grows(faiss):
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


@pytest.mark.parametrize("settings", [{"keys": Keys(0.5)}, {"index": "faiss"}])
def test_loaded_memories_and_selected_samples_go_on(tmp_path, settings, faiss):
    """Samples take all of theirs with them; an index is made anew."""
    (q, k, v, _), chosen = texts(90, batch=3), torch.tensor([2, 2, 0])
    memory, loaded = new_memory(k=2, **settings), new_memory(k=2, tier="disk", **settings)
    feed(memory, q[:, :, :60], k[:, :, :60], v[:, :, :60], [25, 35])
    memory.save(tmp_path / "book")
    loaded.load(tmp_path / "book")
    selected, rest = memory.select_samples(chosen), [x[:, :, 60:] for x in (q, k, v)]
    expected = feed(memory, *rest, [20, 10])
    assert torch.equal(feed(loaded, *rest, [20, 10]), expected)
    assert torch.equal(feed(selected, *(x[chosen] for x in rest), [20, 10]), expected[chosen])
