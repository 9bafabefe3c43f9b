"""A memory is saved and loaded by other memories; one that does not fit, or is damaged, is refused in one line."""

import errno
import gc
import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch

from landmark.attention import Grouped
from landmark.attention.keys import Keys
from landmark.memory import saving
from landmark.memory.saving import HASHES
from landmark.memory.settings import MAPPINGS, TIERS
from landmark.utils.errors import UserError
from tests.flips import flipped
from tests.memory.reading import feed, new_memory, texts
from tests.pairs import all_pairs, name_of
from tests.saved import hash_again

CHUNKS = [20, 13, 20]


def read_two_layers(memory, q, k, v, chunks):
    """Feeds two layers, the second another text; returns the outputs of both."""
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        outs.append([memory.attend(layer, *(x.roll(layer, 2)[:, :, part] for x in (q, k, v))) for layer in (0, 1)])
        memory.commit()
        start += size
    return torch.cat([torch.stack(each) for each in outs], 3)


CASES = all_pairs(
    {
        "here": TIERS,
        "there": TIERS,
        "max_blocks": [None, 4, 40],
        "mapping": MAPPINGS,
        "offset": [0.0, 0.5],
    }
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_loaded_memory_continues_as_the_saved_one(tmp_path, case):
    """With its pending tokens and last key."""
    settings = {"k": 2, "max_blocks": case["max_blocks"], "mapping": case["mapping"]}
    settings["keys"] = Keys(case["offset"])
    texts_ = q, k, v = texts(130)[:3]
    memory = new_memory(**settings, tier=case["here"])
    read_two_layers(memory, q, k, v, CHUNKS)
    memory.save(tmp_path / "book")
    rest = [x[:, :, sum(CHUNKS) :] for x in texts_]
    expected = read_two_layers(memory, *rest, [7, 30, 1, 1, 20])
    for _ in range(2):
        loaded = new_memory(**settings, tier=case["there"])
        loaded.load(tmp_path / "book")
        assert loaded.position == sum(CHUNKS)
        assert torch.equal(read_two_layers(loaded, *rest, [7, 30, 1, 1, 20]), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book"]


@pytest.mark.parametrize("tier", TIERS)
def test_fewer_blocks_than_were_saved_are_the_newest(tmp_path, tier):
    q, k, v, _ = texts(90)
    whole, few = new_memory(k=2), new_memory(k=2, max_blocks=5)
    for memory in (whole, few):
        feed(memory, q[:, :, :60], k[:, :, :60], v[:, :, :60], [25, 35])
    whole.save(tmp_path / "book")
    loaded = new_memory(k=2, max_blocks=5, tier=tier)
    loaded.load(tmp_path / "book")
    rest = [x[:, :, 60:] for x in (q, k, v)]
    assert torch.equal(feed(loaded, *rest, [20, 10]), feed(few, *rest, [20, 10]))


@pytest.mark.parametrize("tier", TIERS)
def test_mean_keys_are_saved_where_they_are_used(tmp_path, tier):
    q, k, v, _ = texts(90)
    memory = new_memory(k=2, scorer="mean_key")
    feed(memory, q[:, :, :60], k[:, :, :60], v[:, :, :60], [25, 35])
    memory.save(tmp_path / "with")
    loaded = new_memory(k=2, scorer="mean_key", tier=tier)
    loaded.load(tmp_path / "with")
    rest = [x[:, :, 60:] for x in (q, k, v)]
    assert torch.equal(feed(loaded, *rest, [20, 10]), feed(memory, *rest, [20, 10]))
    other = new_memory(k=2)
    feed(other, q, k, v, [60])
    other.save(tmp_path / "without")
    with pytest.raises(UserError, match="without what retrieval.scorer=mean_key"):
        loaded.load(tmp_path / "without")


def of_model(name="one", **settings):
    """A memory of a model with this name."""
    memory = new_memory(**({"k": 2} | settings))
    memory.model = None if name is None else lambda: name
    return memory


def saved(folder, **settings):
    q, k, v, _ = texts(60)
    memory = of_model(**settings)
    feed(memory, q, k, v, [25, 35])
    memory.save(folder)
    return q, k, v


def test_an_almost_empty_memory_is_saved(tmp_path):
    q, k, v, _ = texts(10)
    memory = new_memory(20)
    feed(memory, q, k, v, [6])
    memory.save(tmp_path / "book")
    loaded = new_memory(20)
    loaded.load(tmp_path / "book")
    rest = [x[:, :, 6:] for x in (q, k, v)]
    assert torch.equal(feed(loaded, *rest, [4]), feed(memory, *rest, [4]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_size": 5}, "was saved with model.block_size=3, here it is 5"),
        ({"keys": Keys(rope_base=500.0)}, "was saved with model.rope_base=10000.0, here it is 500.0"),
        ({"mapping": "true"}, "was saved with positions.mapping=stingy, here it is true"),
        ({"gate": Grouped(0.5)}, "was saved with model.alpha=0.0, here it is 0.5"),
        ({"keys": Keys(0.5)}, "was saved with model.key_offset=0.0, here it is 0.5"),
        ({"name": "another"}, "was read by another model"),
        ({"name": None}, "was read by another model"),
    ],
)
def test_another_model_is_refused(tmp_path, settings, said):
    saved(tmp_path / "book")
    memory = of_model(**settings)
    with pytest.raises(UserError, match=said):
        memory.load(tmp_path / "book")
    assert memory.position == 0


def test_a_memory_of_a_removed_setting_is_refused(tmp_path):
    saved(tmp_path / "book")
    path = tmp_path / "book" / "memory.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"landmark_values": True}))
    hash_again(tmp_path / "book", HASHES)
    with pytest.raises(UserError, match="landmark_values=True, which this version does not have"):
        of_model().load(tmp_path / "book")


def test_a_memory_that_dropped_wanted_blocks_is_refused(tmp_path):
    saved(tmp_path / "book", max_blocks=6)
    with pytest.raises(UserError, match="memory.blocks=None: .* has only the last 6 blocks; set memory.blocks=6"):
        of_model().load(tmp_path / "book")


def test_a_folder_without_a_memory_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no saved memory: memory.json is missing"):
        new_memory().load(tmp_path)


@pytest.mark.parametrize("tier", TIERS)
def test_a_refused_load_changes_nothing(tmp_path, tier):
    q, k, v, _ = texts(90)
    memory, undisturbed = (new_memory(k=2, tier=tier) for _ in range(2))
    start, rest = ([x[:, :, part] for x in (q, k, v)] for part in (slice(60), slice(60, None)))
    for each in (memory, undisturbed):
        feed(each, *start, [25, 35])
    with pytest.raises(UserError, match="holds no saved memory"):
        memory.load(tmp_path)
    assert memory.position == undisturbed.position == 60
    assert torch.equal(feed(memory, *rest, [20, 10]), feed(undisturbed, *rest, [20, 10]))


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    saved(tmp_path / "book")
    before = {path: path.read_bytes() for path in (tmp_path / "book").iterdir()}
    with pytest.raises(UserError, match="book exists already"):
        saved(tmp_path / "book")
    assert {path: path.read_bytes() for path in (tmp_path / "book").iterdir()} == before


def test_another_format_is_refused(tmp_path):
    saved(tmp_path / "book")
    content = json.loads((tmp_path / "book" / "memory.json").read_text())
    (tmp_path / "book" / "memory.json").write_text(json.dumps(content | {"format": 99}))
    hash_again(tmp_path / "book", HASHES)
    with pytest.raises(UserError, match="the memory has format 99, this version reads 2"):
        of_model().load(tmp_path / "book")


def test_a_chunk_that_is_not_committed_is_not_saved(tmp_path):
    memory = new_memory()
    x = torch.randn(1, 1, 5, 4)
    memory.attend(0, x, x, x)
    with pytest.raises(RuntimeError, match="commit"):
        memory.save(tmp_path / "book")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["layer-1.blocks", "tensors.safetensors", "memory.json"])
@pytest.mark.parametrize("damage", ["removed", "cut short"])
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_missing_or_short_files_are_refused(tmp_path, name, damage, tier):
    saved(tmp_path / "book")
    path = tmp_path / "book" / name
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=name):
        of_model(tier=tier).load(tmp_path / "book")


def edit(path, key, value):
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_an_edited_position_is_noticed(tmp_path):
    saved(tmp_path / "book")
    edit(tmp_path / "book" / "memory.json", "position", 7)
    with pytest.raises(UserError, match=r"memory\.json is damaged, its SHA-256 differs from memory\.sha256: save the"):
        of_model().load(tmp_path / "book")


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_any_flipped_bit_is_noticed(tmp_path, tier):
    saved(tmp_path / "book")
    copies = list(flipped(tmp_path / "book", tmp_path / "copies", count=12))
    assert len(copies) == 12 * 4
    for path in copies:
        with pytest.raises(UserError, match=path.name.rpartition("-")[0]):
            of_model(tier=tier).load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("layers", each) for each in ([], {"0": 3}, {"0": {"added": 1}}, {"0": {"added": 1, "kept": 2}})),
        *(("position", "x"), ("position", -5), ("block_size", None)),
    ],
)
def test_json_that_was_changed_with_its_hash_names_the_key(tmp_path, key, value):
    """Early versions wrote none."""
    saved(tmp_path / "book")
    edit(tmp_path / "book" / "memory.json", key, value)
    hash_again(tmp_path / "book", HASHES)
    with pytest.raises(UserError, match=r"memory\.json.*(layer|position|block_size).*: save the memory again"):
        of_model().load(tmp_path / "book")


def test_a_list_of_hashes_that_was_cut_short_is_noticed(tmp_path):
    saved(tmp_path / "book")
    hashes = tmp_path / "book" / HASHES
    whole = hashes.read_text()
    hashes.unlink()
    with pytest.raises(UserError, match=r"memory\.sha256 does not exist: save the memory again"):
        of_model().load(tmp_path / "book")
    hashes.write_text(whole)
    hashes.write_text("".join(hashes.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"memory\.sha256 is damaged, it has no hash of tensors\.safetensors"):
        of_model().load(tmp_path / "book")


@pytest.mark.parametrize(
    ("damage", "said"), [(Path.unlink, "was removed while"), (lambda p: os.truncate(p, 100), "cut")]
)
def test_a_file_removed_while_in_use(tmp_path, damage, said):
    """The tier "disk" reads the saved file itself: when it is removed, the next retrieval raises an error."""
    texts_ = saved(tmp_path / "book")
    memory = of_model(tier="disk", cache=1)
    memory.load(tmp_path / "book")
    feed(memory, *texts_, [5])
    damage(tmp_path / "book" / "layer-1.blocks")
    with pytest.raises(UserError, match=rf"layer-1.blocks .*{said}"):
        feed(memory, *texts_, [5])


def test_nothing_is_left_of_a_memory_that_could_not_be_saved(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "write_json", full)
    with pytest.raises(UserError, match="could not be saved .No space left on device., nothing is left of it"):
        saved(tmp_path / "book")
    assert list(tmp_path.iterdir()) == []


def fill(folder, what):
    """Read or save three megabytes of blocks there; returns what is said."""
    x = torch.randn(1, 2, 6000, 32)
    memory = new_memory(50, k=2, tier="disk" if what == "reading" else "device", folder=folder)
    try:
        feed(memory, x, x, x, [200] * 30)
        memory.save(folder / "book")
    except UserError as error:
        return str(error)
    return "there was room"


@pytest.mark.parametrize("what", ["reading", "saving"])
def test_files_may_not_grow_further(tmp_path, what):
    """A real write that the system refuses: the process may write files of 100 KB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        said = fill(tmp_path, what)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["reading", "saving"])
def test_no_space_on_disk(tmp_path, what):
    """A real disk that is full: one of a megabyte."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk could be mounted")
    try:
        assert "No space left on device" in fill(tmp_path, what)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.collect()  # closes files without a name
        subprocess.run(["umount", str(tmp_path)], check=True)
