"""A memory and its settings are saved and loaded; one that does not fit, or is damaged, is refused in one line."""

import copy
import errno
import json
import os
import resource
import shutil
import tempfile
from dataclasses import fields
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from safetensors.torch import load_file, save_file

from landmark.attention import Grouped, Scoring
from landmark.attention.keys import Keys
from landmark.memory import saving
from landmark.memory.blocks.cache import BlockCache
from landmark.memory.blocks.settings import BlockCacheSettings
from landmark.memory.landmarks.settings import MemorySettings
from landmark.memory.saving import HASHES
from landmark.utils.constants import MAPPINGS, TIERS
from landmark.utils.errors import UserError
from tests.memory.reading import feed, new_memory, texts
from tests.saved import hash_again


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Lives(RuleBasedStateMachine):
    """A memory of two layers is read with, saved, loaded, damaged and left without room; another reads undisturbed."""

    @initialize(
        tier=st.sampled_from(TIERS),
        max_blocks=st.sampled_from([None, 4, 40]),
        mapping=st.sampled_from(MAPPINGS),
        offset=st.sampled_from([0.0, 0.5]),
    )
    def begin(self, tier, max_blocks, mapping, offset):
        self.folder = Path(tempfile.mkdtemp())
        self.made = partial(new_memory, k=2, max_blocks=max_blocks, mapping=mapping, keys=Keys(offset))
        self.tier, self.memory, self.undisturbed = tier, self.made(tier=tier, folder=self.folder), self.made()
        self.kept, self.steps = [], 0  # saved folders, and copies of the undisturbed memory at the time

    def teardown(self):
        shutil.rmtree(self.folder)

    def chunk(self, size):
        self.steps += 1
        return texts(size, seed=self.steps)[:3]

    def attended(self, memory, chunk):
        return [memory.attend(layer, *(x.roll(layer, 2) for x in chunk)) for layer in (0, 1)]

    @rule(sizes=st.lists(st.sampled_from([1, 2, 7, 13, 30]), min_size=1, max_size=4))
    def read(self, sizes):
        for chunk in map(self.chunk, sizes):
            ours, expected = (self.attended(memory, chunk) for memory in (self.memory, self.undisturbed))
            assert torch.equal(torch.stack(ours), torch.stack(expected))
            for memory in (self.memory, self.undisturbed):
                memory.commit()
            self.same_counts()

    def same_counts(self):
        """What is fetched, and how long it takes, differs."""
        ours, theirs = self.memory.stats, self.undisturbed.stats
        if not self.kept:
            assert {n: x for n, x in ours.items() if n in COUNTED} == {n: x for n, x in theirs.items() if n in COUNTED}
        assert self.memory.position == self.undisturbed.position
        assert ours["blocks_kept"] == theirs["blocks_kept"]

    @rule(size=st.integers(1, 9))
    def fail_midway(self, size):
        """Layer 1 is not reached. As if it had never been: its last key and counts are forgotten."""
        chunk = self.chunk(size)
        self.memory.attend(0, *chunk)
        with pytest.raises(RuntimeError, match=r"commit\(\) before the next chunk, or discard\(\) after an error"):
            self.memory.attend(0, *chunk)
        with pytest.raises(RuntimeError, match="commit"):
            self.memory.save(self.folder / "uncommitted")
        self.memory.discard()
        self.same_counts()

    @rule(tier=st.sampled_from(TIERS))
    def save_and_load(self, tier):
        folder = self.folder / str(len(self.kept))
        with (
            mock.patch.object(saving, "write_json", no_space),
            pytest.raises(UserError, match="could not be saved .No space left on device., nothing is left of it"),
        ):
            self.memory.save(folder)
        self.memory.save(folder)
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(UserError, match=f"{folder.name} exists already"):
            self.undisturbed.save(folder)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        self.kept.append((folder, copy.deepcopy(self.undisturbed)))
        assert {path.name for path in self.folder.iterdir()} == {path.name for path, _ in self.kept}
        self.tier, self.memory = tier, self.made(tier=tier, folder=self.folder)
        self.memory.load(folder)

    @precondition(lambda self: self.undisturbed.position > 60)
    @rule()
    def reset(self):
        for memory in (self.memory, self.undisturbed):
            memory.reset()

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), how=st.sampled_from(["removed", "cut short", "one bit"]))
    def load_damaged(self, data, how):
        """A refused load changes nothing."""
        copied = self.folder / "copy"
        shutil.copytree(self.kept[-1][0], copied)
        path = data.draw(st.sampled_from(sorted(copied.iterdir())))
        content = bytearray(path.read_bytes())
        if how == "removed" or not content:
            path.unlink()
        elif how == "cut short":
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        with pytest.raises(UserError, match=path.name):
            self.memory.load(copied)
        shutil.rmtree(copied)

    @precondition(lambda self: self.tier == "disk" and self.kept)
    @rule()
    def disk_becomes_full(self):
        """After the first of two layers has stored the chunk. A memory whose layers differ is not used."""
        self.attended(self.memory, self.chunk(9))
        added, write = self.memory.layers[0].store.added, os.pwrite

        def full_soon(*given):
            return write(*given) if self.memory.layers[0].store.added == added else no_space()

        with mock.patch.object(os, "pwrite", full_soon), pytest.raises(UserError, match="no room for"):
            self.memory.commit()
        assert self.memory.layers[0].store.added > self.memory.layers[1].store.added
        self.memory.discard()
        uses = (lambda: self.attended(self.memory, self.chunk(2)), lambda: self.memory.save(self.folder / "torn"))
        for use in (*uses, self.memory.commit, lambda: self.memory.select_samples(torch.tensor([0]))):
            with pytest.raises(RuntimeError, match="layers differ: load the memory again, or reset"):
                use()
        assert not (self.folder / "torn").exists()
        folder, then = self.kept[-1]
        self.memory.load(folder)
        self.undisturbed = copy.deepcopy(then)


COUNTED = ("chunks", "searches", "lookups", "retrievals", "blocks_retrieved")


def test_whatever_happens_to_a_memory_it_reads_on_as_one_to_which_nothing_did():
    once = settings(max_examples=25, stateful_step_count=15, derandomize=True, phases=[Phase.generate])
    run_state_machine_as_test(Lives, settings=once)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("given", [{"max_blocks": 5}, {"scorer": "mean_key"}])
def test_fewer_blocks_than_were_saved_are_the_newest_and_mean_keys_are_saved(tmp_path, tier, given):
    q, k, v, _ = texts(90)
    whole, memory = new_memory(k=2, **given | {"max_blocks": None}), new_memory(k=2, **given)
    start, rest = ([x[:, :, part] for x in (q, k, v)] for part in (slice(60), slice(60, None)))
    for each in (whole, memory):
        feed(each, *start, [25, 35])
    whole.save(tmp_path / "book")
    loaded = new_memory(k=2, tier=tier, **given)
    loaded.load(tmp_path / "book")
    assert torch.equal(feed(loaded, *rest, [20, 10]), feed(memory, *rest, [20, 10]))


def of_model(name="one", **given):
    """A memory of a model with this name."""
    memory = new_memory(**({"k": 2} | given))
    memory.model = None if name is None else lambda: name
    return memory


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """A memory in a folder, and one that has dropped blocks."""
    folder, (q, k, v, _) = tmp_path_factory.mktemp("saved"), texts(60)
    for name, given in (("book", {}), ("few", {"max_blocks": 6})):
        memory = of_model(**given)
        feed(memory, q, k, v, [25, 35])
        memory.save(folder / name)
    return folder


@pytest.fixture
def book(saved_once, tmp_path):
    return shutil.copytree(saved_once / "book", tmp_path / "book")


def edit(**changes):
    """A change of memory.json, with its hash."""

    def edited(folder):
        path = folder / "memory.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        hash_again(folder, HASHES)

    return edited


def changed(change):
    """A change of a folder by a function, and hashes that fit it."""

    def made(folder):
        change(folder)
        hash_again(folder, HASHES)

    return made


def link(folder):
    (folder / "layer-1.safetensors").rename(folder.parent / "outside")
    (folder / "layer-1.safetensors").symlink_to(folder.parent / "outside")


def lose_landmarks(folder):
    tensors = load_file(file := folder / "layer-1.safetensors")
    save_file({name: x for name, x in tensors.items() if "landmarks" not in name}, file)


def cut_end(folder):
    (folder / HASHES).write_text((folder / HASHES).read_text()[:-1])


def grow(name):
    """A file that a hash would need minutes for; its hole takes no disk."""
    return lambda folder: os.truncate(folder / name, 1 << 40)


AGAIN = r"memory\.json.*(layer|position).*: save the memory again"


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (None, {"block_size": 5}, "was saved with model.block_size=3, here it is 5"),
        (None, {"k": 3}, "was read with retrieval.k=2, here it is 3: set retrieval.k=2"),
        (None, {"mapping": "true"}, "was saved with positions.mapping=stingy, here it is true"),
        (None, {"gate": Grouped(0.5)}, "was saved with model.alpha=0.0, here it is 0.5"),
        (None, {"keys": Keys(0.5)}, "was saved with model.key_offset=0.0, here it is 0.5"),
        (None, {"scorer": "mean_key"}, "without the keys that retrieval.scorer=mean_key"),
        (None, {"name": "another"}, "was read by another model"),
        (edit(landmark_values=True), {}, "landmark_values=True, which this version does not have"),
        (edit(format=99), {}, "the memory has format 99, this version reads 3"),
        *((edit(layers=x), {}, AGAIN) for x in ([], {"0": 3}, {"0": {"added": 1}}, {"0": {"added": 1, "kept": 2}})),
        *((edit(position=x), {}, AGAIN) for x in ("x", -5)),
        (edit(layers={"0/../../outside": {"added": 15, "kept": 15}}), {}, "is no layer"),
        (edit(position=61), {}, "layer 1 has not read position="),
        (changed(link), {}, "which is not in it"),
        (changed(lose_landmarks), {}, "layer-1.safetensors is missing or damaged .*landmarks"),
        (cut_end, {}, r"memory\.sha256 is damaged, its last line is cut: save the memory again"),
        (
            grow("layer-1.safetensors"),
            {},
            r"1\.safetensors is damaged, 1099511627776 bytes long, not \d+: save",
        ),
        (grow("memory.json"), {}, r"memory\.json .*: save the memory again"),
    ],
)
def test_what_does_not_fit_or_was_changed_is_refused(book, change, given, said):
    if change is not None:
        change(book)
    memory = of_model(**given)
    with pytest.raises(UserError, match=said):
        memory.load(book)
    assert memory.position == 0


def test_it_goes_on_with_keys_of_its_shape_and_has_all_wanted_blocks(saved_once):
    (memory := of_model()).load(saved_once / "book")
    with pytest.raises(UserError, match="the memory has keys like"):
        memory.attend(1, *(torch.ones(1, 1, 1, 2) for _ in range(3)))
    with pytest.raises(UserError, match="memory.blocks=None: .* has only the last 6 blocks; set memory.blocks=6"):
        of_model().load(saved_once / "few")


@pytest.mark.parametrize("where", ["disk", "device", "without landmarks", "without landmarks, disk"])
def test_files_may_not_grow_further(tmp_path, where):
    """A real write that the system refuses, while reading or saving: the process may write files of 100 KB."""
    x, (soft, hard) = torch.randn(1, 2, 6000, 32), resource.getrlimit(resource.RLIMIT_FSIZE)

    def read_and_save():
        if where.startswith("without landmarks"):
            memory = BlockCache(8, 4, window=16, tier="disk" if "disk" in where else "device", folder=tmp_path)
            memory.attend(0, x, x, x, Scoring())
            memory.commit()
        else:
            feed(memory := new_memory(50, k=2, tier=where, folder=tmp_path), x, x, x, [200] * 30)
        memory.save(tmp_path / "book")

    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match="File too large"):
            read_and_save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_mapped_has_its_room_before(tmp_path):
    """A write to the map of a file without room would end the process."""
    x, folders = torch.randn(1, 2, 60, 32), []
    memory = BlockCache(8, 4, window=16, tier="disk", folder=tmp_path)
    with mock.patch.object(os, "posix_fallocate", side_effect=lambda *given: folders.append(given[2])):
        memory.attend(0, x, x, x, Scoring())
    assert folders[-1] >= memory.layers[0].keys.nbytes
    with pytest.raises(UserError, match="memory.folder=/proc: cannot write a file there"):
        BlockCache(8, 4, window=16, tier="disk", folder="/proc").attend(0, x, x, x, Scoring())


# ---- settings: what is refused, what is saved, and the page that lists them


PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": -1}, "retrieval.k=-1: must be at least 0"),
        ({"kk": 4}, "memory has no setting kk: it has cache, "),
        ({"max_blocks": 3}, "memory.blocks=3: is less than retrieval.k=4"),
        ({"cutoff": 1.5}, "cmt.cutoff=1.5: must be at least 0 and at most 1"),
        ({"mapping": "auto"}, "positions.mapping=auto: must be one of stingy, true"),
        ({"rerank": 3}, "retrieval.rerank=3: is less than retrieval.k=4"),
        ({"rerank": 8, "granularity": "per_head"}, "rerank=8: chooses for .*, not retrieval.granularity=per_head"),
        ({"first": 1}, "memory has no setting first: it has cache, "),
        ({"index": "faiss", "granularity": "per_token"}, "memory.index=faiss: chooses for each query and head, not"),
        ({"index": "faiss", "scorer": "mean_key"}, "index=faiss: ranks by landmarks, not retrieval.scorer=mean_key"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        MemorySettings().updated(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "retrieval.k=0: must be at least 1"),
        ({"first": 129}, "retrieval.first=129: is more than retrieval.k=128"),
        ({"window": None}, "memory.window=null: must have a value"),
        ({"rerank": 8}, "memory has no setting rerank: it has dense, first, "),
    ],
)
def test_settings_without_landmarks_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        BlockCacheSettings().updated(settings)


@pytest.mark.parametrize(
    "settings",
    [
        *(MemorySettings(), MemorySettings(k=2, cutoff=0.1)),
        *(BlockCacheSettings(), BlockCacheSettings(k=4, first=0, mapping="stingy"), BlockCacheSettings(dense=0, k=2)),
    ],
)
def test_what_is_saved_are_the_settings(settings):
    saved = json.loads(json.dumps(settings.saved()))
    assert type(settings).from_saved(saved) == settings
    assert len(saved) < 8


def test_a_file_of_before_keeps_its_meaning():
    """Files without landmarks left out what is usual with landmarks, and have what there is one of."""
    saved = {"granularity": "per_token_and_group", "scorer": "mean_key", "first": 1, "window": 512, "mapping": "auto"}
    assert BlockCacheSettings.from_saved(saved) == BlockCacheSettings(k=4)
    assert BlockCacheSettings(k=4).saved() == saved
    with pytest.raises(UserError, match="granularity=per_query: must be one of per_token_and_group, "):
        BlockCacheSettings.from_saved(saved | {"granularity": "per_query"})


@pytest.mark.parametrize("kind", [MemorySettings, BlockCacheSettings])
def test_the_page_of_settings_has_them_all(kind):
    written = PAGE.read_text(encoding="utf-8")
    missing = [key for item in fields(kind) if f"| `{(key := item.metadata['key'])}`" not in written]
    assert set(missing) <= {"seed"}


def cache_of(text, **given):
    """A cache without landmarks that has read a text."""
    memory = BlockCache(**{"block_size": 8, "k": 4, "window": 16, "dense": 0} | given)
    x = torch.randn(1, 2, text, 4, generator=torch.Generator().manual_seed(0))
    memory.attend(0, x, x, x, Scoring())
    memory.commit()
    return memory


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": 3}, "was read with retrieval.k=4, here it is 3: set retrieval.k=4"),
        ({"first": 0}, "was read with retrieval.first=1, here it is 0"),
        ({"window": 24}, "was read with memory.window=16, here it is 24"),
        ({"dense": 100}, "was read with memory.dense=0, here it is 100"),
        ({"dense": None}, "was read with memory.dense=0, here it is 6144"),
        ({"mapping": "true"}, "was read with positions.mapping=auto, here it is true"),
        ({"block_size": 4}, "was read with model.block_size=8, here it is 4"),
    ],
)
def test_a_text_that_was_read_in_another_way_is_refused(tmp_path, given, said):
    cache_of(200).save(tmp_path / "long")
    loaded = BlockCache(**{"block_size": 8, "k": 4, "window": 16, "dense": 0} | given)
    with pytest.raises(UserError, match=said):
        loaded.load(tmp_path / "long")
    assert loaded.position == 0


def test_a_cpus_dense_is_refused_on_a_gpu_but_not_where_all_keys_were_read(tmp_path, monkeypatch, caplog):
    cache_of(200, dense=None).save(tmp_path / "long")
    cache_of(40).save(tmp_path / "short")
    BlockCache(8, 3, window=24, dense=0).load(tmp_path / "short")
    monkeypatch.setattr("landmark.memory.blocks.cache.DENSE", {"cpu": 100})
    with pytest.raises(UserError, match="was read with memory.dense=6144, here it is 100: set memory.dense=6144"):
        BlockCache(8, 4, window=16).load(tmp_path / "long")
    BlockCache(8, 4, window=16, dense=6144).load(tmp_path / "long")
    assert not caplog.messages
    content = json.loads((tmp_path / "long" / "memory.json").read_text())
    for key in ("retrieval.k", "memory.dense"):  # as earlier versions saved it
        del content[key]
    (tmp_path / "long" / "memory.json").write_text(json.dumps(content))
    hash_again(tmp_path / "long", HASHES)
    BlockCache(8, 2, window=16).load(tmp_path / "long")
    assert "does not say with which memory.dense, retrieval.k it was read" in caplog.text
