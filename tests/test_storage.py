"""A disk that is full, or that nothing can be written to, ends in a line; with room again the same command goes on."""

import errno
import math
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from landmark.training.checkpointing import checkpoints
from landmark.utils import files
from landmark.utils.metrics_csv import read_metrics
from tests.forked import python
from tests.training.training_case import assert_same_weights, make_config, run

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
    return python(str(RUN), "+experiment=survival", "data.max_documents=40", *words, cwd=folder)


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


def test_json_keeps_the_order_of_keys_and_where_nan_is_refused_the_old_file(tmp_path: Path):
    file, value = tmp_path / "new" / "value.json", {"b": [1, 2.5, None], "a": "é"}
    files.write_json(file, value)
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(file, math.nan)
    assert list(files.read_json(file)) == ["b", "a"]
    assert files.read_json(file) == value
    files.write_atomic(tmp_path / "atomic", b"")
    (tmp_path / "ordinary").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "atomic").stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)


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
