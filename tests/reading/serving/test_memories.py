"""Documents on disk that several requests save, open and delete at once."""

import errno
import os
import random
import signal
import threading
from contextlib import closing

import pytest
import torch

from landmark.reading.serving.memories import Failed, Full, Memories, Missing, ServerSettings
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import read

KEY = "a-key"


@pytest.fixture(scope="module")
def document(model):
    read(model, torch.arange(30)[None], memory := model.new_memory())
    return memory


@pytest.fixture
def start(model, tmp_path):
    return lambda **limits: Memories(ServerSettings(tmp_path, (KEY,), **limits), model)


def files(folder):
    return [path for path in folder.glob("*/**/*") if path.is_file()]


def test_a_document_is_not_deleted_while_another_is_saved(start, document, tmp_path):
    memories = start()
    memories.save(KEY, "one", document)
    deleting = threading.Thread(target=memories.delete, args=(KEY, "one"))
    with memories._writing:
        deleting.start()
        deleting.join(0.3)
        assert files(tmp_path)
    deleting.join()
    assert not files(tmp_path)


def test_a_document_is_opened_while_it_is_replaced_and_missing_when_it_is_deleted(start, document):
    memories, errors = start(), []

    def open_it():
        while True:
            try:
                assert memories.ids(KEY, "one") == [*range(30)]
            except Exception as error:
                errors.append(error)
                return

    for _ in range(5):
        memories.save(KEY, "one", document)
        opening = [threading.Thread(target=open_it) for _ in range(3)]
        for thread in opening:
            thread.start()
        memories.save(KEY, "one", document)
        memories.delete(KEY, "one")
        for thread in opening:
            thread.join()
    assert {type(error) for error in errors} == {Missing}


def test_the_bytes_on_disk_count(start, model, document, tmp_path):
    """Pending tokens and sliding windows are bytes too, and are not in the statistics of a memory."""
    read(model, torch.arange(3)[None], memory := model.new_memory())
    assert memory.stats["bytes_kept"] == 0
    with closing(start(disk=100)) as memories, pytest.raises(Full, match="no room"):
        memories.save(KEY, "one", memory)
    assert not files(tmp_path)
    memories = start()
    for name in ("one", "two"):
        memories.save(KEY, name, document)
    memories.delete(KEY, "two")
    counted = dict(memories._sizes)
    memories.close()
    assert start()._sizes == counted
    assert sum(counted.values()) == sum(path.stat().st_size for path in files(tmp_path))


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(start, document, tmp_path):
    memories = start()
    memories.save(KEY, "one", document)
    (path,) = tmp_path.rglob("windows.safetensors")
    path.unlink()
    os.mkfifo(path)
    assert memories.list(KEY) == {}
    with pytest.raises(Failed, match="its files are damaged"):
        memories.ids(KEY, "one")


def test_on_a_full_disk_it_starts_and_documents_can_be_deleted(start, document, tmp_path, monkeypatch):
    first = start()
    first.save(KEY, "one", document)
    first.close()

    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("landmark.memory.saving.write_json", full)
    memories = start()
    with pytest.raises(Full, match="the server's disk is full; delete some"):
        memories.save(KEY, "two", document)
    memories.delete(KEY, "one")
    assert not files(tmp_path)


def test_what_a_killed_server_left_is_deleted(start, document, tmp_path):
    """A memory that was never finished, the one before of a document that was replaced, and a deleted one."""
    memories = start()
    memories.save(KEY, "one", document)
    memories.save(KEY, "one", document)
    (newest,) = (path.parent for path in tmp_path.rglob("memory.json"))
    for left in (newest.with_name("1"), newest.with_name(".3.7.tmp"), newest.parent.with_name("two") / ".1"):
        document.save(left)
    (tmp_path / "notes").mkdir()
    memories.close()
    memories = start()
    assert memories.memory(KEY, "one").get_seq_length() == 30
    assert list(newest.parent.parent.rglob("memory.json")) == [newest / "memory.json"]
    assert memories.list(KEY) == {"one": 30}
    assert (tmp_path / "notes").is_dir()


def test_any_flipped_bit_is_noticed(start, document, tmp_path):
    (memories := start()).save(KEY, "one", document)
    draw, before = random.Random(0), sorted(path.name for path in tmp_path.rglob("*"))
    saved = [path for path in files(tmp_path) if path.stat().st_size]
    assert len(saved) >= 5
    for path in saved * 3:
        content = path.read_bytes()
        altered = bytearray(content)
        altered[draw.randrange(len(altered))] ^= 1 << draw.randrange(8)
        memories.close()
        path.write_bytes(altered)
        memories = start()
        assert sorted(each.name for each in tmp_path.rglob("*")) == before
        with pytest.raises(Failed):
            memories.memory(KEY, "one")
        path.write_bytes(content)
    assert torch.equal(memories.memory(KEY, "one").ids, document.ids)


def test_one_server_at_a_time_has_a_folder_that_can_be_one(tmp_path):
    """Each of two would delete what the other is about to save. The lock of one that was killed is no more."""
    settings = ServerSettings(tmp_path / "memories", (KEY,))
    said = "another server keeps its memories here: stop it, or name another folder"
    with closing(Memories(settings, None)), pytest.raises(UserError, match=said):
        Memories(settings, None)
    if not (child := os.fork()):
        try:
            _held = Memories(settings, None)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    Memories(settings, None).close()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="memories cannot be kept here"):
        Memories(ServerSettings(tmp_path / "file", (KEY,)), None)
    with pytest.raises(UserError, match="at least one key"):
        ServerSettings(tmp_path, ())
    with pytest.raises(UserError, match="tokens=0"):
        ServerSettings(tmp_path, (KEY,), tokens=0)
