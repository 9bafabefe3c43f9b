"""A disk that is full or read-only ends in a line, and with room the same command goes on; so does what was killed."""

import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from landmark.experiment.data import prepare
from landmark.experiment.data.tokenizers import load_tokenizer
from landmark.experiment.runs.identity import digest
from landmark.experiment.runs.records import Records, sweep
from landmark.utils import files
from landmark.utils.checkpoints import checkpoints
from landmark.utils.metrics_csv import read_metrics
from tests.experiment.training.training_case import assert_same_weights, make_config, make_corpus, run
from tests.forked import python
from tests.memory.reading import feed, new_memory, texts
from tests.workplace import write_books

RUN = Path(__file__).parents[1] / "run.py"


class Disk:
    """A small file system in memory. Making one takes the rights of an administrator."""

    def __init__(self, folder: Path, size: str) -> None:
        folder.mkdir()
        self.folder = folder
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def change(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)

    def fill(self, leave: int) -> Path:
        """All but so many bytes."""
        filling, free = self.folder / "filling", shutil.disk_usage(self.folder).free
        filling.write_bytes(bytes(free - leave))
        return filling


@pytest.fixture
def make_disk(tmp_path):
    disks = []

    def make(size):
        disks.append(Disk(tmp_path / f"disk{len(disks)}", size))
        return disks[-1]

    yield make
    for disk in disks:
        subprocess.run(["umount", "--lazy", disk.folder], check=True)


def start(folder, *words):
    text = "data=stdlib", "data.max_documents=40", "tokenizer=bytes", "size=nano", "trainer=cpu", "logger=csv"
    return python(str(RUN), *text, *words, cwd=folder)


def test_disk_full_in_preparation(make_disk, tmp_path):
    """4.4 MB of tokens do not fit; nothing of them is left, and with room it begins anew."""
    disk = make_disk("2m")
    done = start(tmp_path, f"output={disk.folder}", "task=prepare")
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: {disk.folder}/data/")
    assert "No space left on device: make room" in error
    assert "Traceback" not in done.stderr
    assert {path.suffix for path in disk.folder.glob("data/*")} == {".lock"}
    disk.change("size=20m")
    done = start(tmp_path, f"output={disk.folder}", "task=prepare")
    assert done.returncode == 0, done.stderr
    disk.change("ro")
    done = start(tmp_path, f"output={disk.folder}")
    assert done.returncode == 2
    assert "Read-only file system: make room, or name another output=" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_disk_full_in_training(make_disk, tmp_path):
    config = make_config("transformer")
    model, _ = run(config, tmp_path / "undisturbed")
    disk = make_disk("8m")
    folder = disk.folder / "run" / "checkpoints"
    (disk.folder / "run").mkdir()
    filling = disk.fill(leave=200_000)  # for one checkpoint of 130 KB
    with pytest.raises(OSError, match="No space left on device") as error:
        run(config, disk.folder)
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(folder / "step-00000016.ckpt")
    (path,) = checkpoints(folder)
    assert sorted(each.name for each in folder.iterdir()) == [path.name, f"{path.name}.sha256"]
    filling.unlink()
    again, _ = run(config, disk.folder)
    assert_same_weights(model, again)
    ours, theirs = (read_metrics(each / "run" / "metrics.csv") for each in (disk.folder, tmp_path / "undisturbed"))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "value.txt"
    files.write_atomic(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        files.write_atomic(file, b"new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


# ---- processes that are killed before their n-th change of a file, n drawn at random, and do their work again


CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
NAMES_ALONE = (".csv", ".json", ".sha256")  # their content has times


def train(folder: Path) -> None:
    sweep(Records(folder), [])
    run(make_config("transformer", steps=12, checkpoint_every=4), folder / "runs")


def save_memory(folder: Path) -> None:
    if (folder / "book").exists():
        return
    q, k, v, _ = texts(60)
    memory = new_memory(k=2)
    feed(memory, q, k, v, [25, 35])
    memory.save(folder / "book", {"chat.json": b"[]"})


def prepare_corpus(folder: Path) -> None:
    if not (folder.parent / "books").exists():
        (folder.parent / "books").mkdir()
        write_books(folder.parent / "books")
    sweep(Records(folder), [folder / "data"])
    prepare("pg19", load_tokenizer("bytes"), folder / "data", path=folder.parent / "books", progress=False)


def write_record(folder: Path) -> None:
    records, settings = Records(folder), {"steps": 3}
    identity, labels = digest(settings), {"size": "nano", "data": "x", "tokenizer": "bytes", "seed": 0}
    sweep(records, [])
    if records.find("rows", identity) is None:
        with records.lock("rows", identity):
            records.write("rows", identity, settings, labels, {"loss": 3.0})


def killed_at(work: Callable[[Path], None], folder: Path, number: int | None) -> tuple[int | None, int]:
    """Do the work in a process of its own. number: of the change before which it is killed; None: never. Returns the
    exit code (below 0: the signal that ended it), and the changes that it made."""
    folder.mkdir(exist_ok=True)
    if work is train:
        make_corpus(folder / "runs" / "data")
    forking = multiprocessing.get_context("fork")
    changes = forking.Value("i", 0, lock=False)

    def child() -> None:
        own = os.getpid()

        def count(event: str, given: tuple[Any, ...]) -> None:
            writes = event == "open" and len(given) == 3 and isinstance(given[2], int) and given[2] & os.O_ACCMODE
            if (writes or event in CHANGES) and os.getpid() == own and str(folder) in str(given[:2]):
                changes.value += 1
                if changes.value == number:
                    os.kill(own, signal.SIGKILL)

        with open(folder.with_suffix(".log"), "a") as log:
            for standard in (1, 2):
                os.dup2(log.fileno(), standard)
        sys.addaudithook(count)
        work(folder)

    process = forking.Process(target=child)
    process.start()
    process.join()
    return process.exitcode, changes.value


def content(folder: Path) -> dict[str, Any]:
    """All files and folders, those without times with their bytes; of metrics.csv the losses. Not checkpoints: when a
    run has its record, the next start deletes them all (`tests/experiment/runs/test_records.py`)."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.parent.name == "checkpoints":
            continue
        if path.name == "metrics.csv":
            found[str(path.relative_to(folder))] = [(row["step"], row.get("train/loss")) for row in read_metrics(path)]
        else:
            compared = path.is_file() and path.suffix not in NAMES_ALONE
            found[str(path.relative_to(folder))] = path.read_bytes() if compared else None
    return found


def test_what_is_killed_at_any_change_of_a_file_is_whole_afterwards(tmp_path):
    draw, kills = random.Random(1), 0
    works = train, save_memory, prepare_corpus, write_record
    for work in works:
        code, changes = killed_at(work, whole := tmp_path / f"{work.__name__}-whole", None)
        assert (code, changes > 0) == (0, True), whole.with_suffix(".log").read_text()
        expected = content(whole)
        for number in range(2):
            place, at = tmp_path / f"{work.__name__}-{number}", draw.randrange(1, changes + 1)
            code, _ = killed_at(work, place, at)
            kills += code == -signal.SIGKILL
            if code == -signal.SIGKILL and draw.random() < 0.3:  # once more, on the way from there
                kills += killed_at(work, place, draw.randrange(1, changes + 1))[0] == -signal.SIGKILL
            code, _ = killed_at(work, place, None)
            assert code == 0, place.with_suffix(".log").read_text()[-2000:]
            assert content(place) == expected, f"{place}, killed before change {at} of {changes}"
    assert kills >= 2 * len(works)
