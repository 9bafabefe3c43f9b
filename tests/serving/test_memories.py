"""Memories on disk that several requests save, open and delete at once."""

import errno
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from landmark.serving.memories import CONTENT, Failed, Full, Memories, Missing, Saved, ServerSettings
from landmark.utils.errors import UserError
from tests.flips import flipped

KEY = "a-key"


@torch.no_grad()
def read(model, count):
    """A memory of a text of so many tokens."""
    memory = model.new_memory()
    model(torch.arange(count)[None] % 256, past_key_values=memory)
    return memory


def test_a_memory_is_not_deleted_while_another_is_saved(model, tmp_path):
    memories = Memories(ServerSettings(tmp_path, (KEY,)), model)
    memories.save(KEY, "documents", "one", Saved(list(range(30))), read(model, 30))
    deleting = threading.Thread(target=memories.delete, args=(KEY, "documents", "one"))
    with memories._writing:
        deleting.start()
        deleting.join(0.3)
        assert list(tmp_path.rglob(CONTENT))
    deleting.join()
    assert not list(tmp_path.rglob(CONTENT))


def test_a_document_that_is_deleted_while_it_is_opened_is_missing(model, tmp_path):
    memories, memory, errors = Memories(ServerSettings(tmp_path, (KEY,)), model), read(model, 30), []

    def open_it():
        while True:
            try:
                memories.open(KEY, "documents", "one", must_exist=True)
            except Exception as error:
                errors.append(error)
                return

    for _ in range(20):
        memories.save(KEY, "documents", "one", Saved(list(range(30))), memory)
        opening = [threading.Thread(target=open_it) for _ in range(3)]
        for thread in opening:
            thread.start()
        memories.delete(KEY, "documents", "one")
        for thread in opening:
            thread.join()
    assert {type(error) for error in errors} == {Missing}


def test_the_bytes_on_disk_count(model, tmp_path):
    """Pending tokens and sliding windows are bytes too, and are not in the statistics of a memory."""
    memory = read(model, 3)
    assert memory.stats["bytes_kept"] == 0
    memories = Memories(ServerSettings(tmp_path, (KEY,), disk=100), model)
    with pytest.raises(Full, match="no room"):
        memories.save(KEY, "sessions", "one", Saved(list(range(memory.get_seq_length()))), memory)
    assert not [path for path in tmp_path.glob("*/**/*") if path.is_file()]


def test_the_files_of_other_memories_are_not_counted_again(model, tmp_path, monkeypatch):
    memories, walked = Memories(ServerSettings(tmp_path, (KEY,)), model), []
    memory, below = read(model, 30), Path.rglob
    memories.save(KEY, "documents", "one", Saved(list(range(30))), memory)
    monkeypatch.setattr(Path, "rglob", lambda folder, pattern: walked.append(folder.name) or below(folder, pattern))
    memories.save(KEY, "documents", "two", Saved(list(range(30))), memory)
    assert set(walked) == {"two"}
    memories.delete(KEY, "documents", "two")
    counted = dict(memories._sizes)
    memories.close()
    assert Memories(ServerSettings(tmp_path, (KEY,)), model)._sizes == counted
    assert sum(counted.values()) == sum(path.stat().st_size for path in below(tmp_path, "*/one/**/*") if path.is_file())


def test_on_a_full_disk_it_starts_and_memories_can_be_deleted(model, tmp_path, monkeypatch, caplog):
    first = Memories(ServerSettings(tmp_path, (KEY,)), model)
    first.save(KEY, "documents", "one", Saved(list(range(30))), read(model, 30))
    first.close()

    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("landmark.serving.memories.write_json", full)
    memories = Memories(ServerSettings(tmp_path, (KEY,)), model)
    assert "the disk is full: memories can be asked and deleted" in caplog.text
    with pytest.raises(Full, match="the server's disk is full; delete some"):
        memories.save(KEY, "documents", "two", Saved(list(range(30))), read(model, 30))
    memories.delete(KEY, "documents", "one")
    assert not list(tmp_path.rglob(CONTENT))


def test_what_a_killed_server_left_is_deleted(model, tmp_path):
    """A memory that was never finished, and the one before or after of a memory that was replaced."""
    settings, memory = ServerSettings(tmp_path, (KEY,)), read(model, 30)
    memories = Memories(settings, model)
    memories.save(KEY, "sessions", "one", Saved(list(range(memory.get_seq_length()))), memory)
    folder = next(tmp_path.rglob(CONTENT)).parent
    for left in (folder / "old", folder / ".new.7.partial", folder.with_name("two") / "new"):
        memory.save(left)
    (tmp_path / "notes").mkdir()
    memories.close()
    memories = Memories(settings, model)
    saved = memories.open(KEY, "sessions", "one", must_exist=True)
    assert memories.memory(KEY, "sessions", "one", saved).get_seq_length() == 30
    assert len(list(folder.iterdir())) == 2
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
    memory.save(folder / "old")
    memories.save(KEY, "sessions", "one", Saved(list(range(memory.get_seq_length()))), memory)
    assert len(list(folder.iterdir())) == 2
    assert (tmp_path / "notes").is_dir()


def test_any_flipped_bit_is_noticed(model, tmp_path, caplog):
    """Of blocks, windows, ids, the chat, and the file that names the memory; none deletes it at the next start."""
    chat, settings = [{"role": "user", "content": "Who waits?"}], ServerSettings(tmp_path / "one", (KEY,))
    memories, noticed = Memories(settings, model), 0
    memories.save(KEY, "sessions", "one", Saved(list(range(30)), 0, chat), read(model, 30))
    memories.close()
    before = sorted(path.name for path in settings.folder.rglob("*"))
    for folder in flipped(settings.folder, tmp_path / "copies", count=3):
        memories = Memories(ServerSettings(folder, (KEY,)), model)
        assert sorted(path.name for path in folder.rglob("*")) == before
        try:
            saved = memories.open(KEY, "sessions", "one", must_exist=True)
            memory = memories.memory(KEY, "sessions", "one", saved)
        except Failed:
            noticed += 1
        else:  # of who has the folder
            assert folder.name.startswith("server.json")
            assert saved.chat == chat
            assert torch.equal(memory.ids, read(model, 30).ids)
        memories.close()
    assert noticed >= 3 * 5


HOLD = """
import sys, time
from pathlib import Path
from landmark.serving.memories import Memories, ServerSettings
from landmark.utils.errors import UserError
try:
    memories = Memories(ServerSettings(Path(sys.argv[1]), ("a-key",)), None)
except UserError as error:
    sys.exit(str(error))
print("here", flush=True)
time.sleep(600)
"""


def test_one_server_at_a_time_has_a_folder(tmp_path):
    """Each of two would delete what the other is about to save. The lock of one that was killed is no more."""
    folder = tmp_path / "memories"
    start = [sys.executable, "-c", HOLD, str(folder)]
    first = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "here\n"
        second = subprocess.run(start, capture_output=True, text=True, timeout=300, check=False)
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert f"a server (process {first.pid} on " in second.stderr
        with pytest.raises(UserError, match="keeps its memories here: stop it, or name another folder"):
            Memories(ServerSettings(folder, (KEY,)), None)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    Memories(ServerSettings(folder, (KEY,)), None).close()


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="memories cannot be kept here"):
        Memories(ServerSettings(tmp_path / "file", (KEY,)), None)
