import math
import os
import stat
from pathlib import Path

import pytest

from landmark.utils import files


def test_json_round_trip_keeps_the_order_of_keys(tmp_path: Path):
    value = {"b": [1, 2.5, None], "a": "é"}
    files.write_json(tmp_path / "new" / "value.json", value)
    assert list(files.read_json(tmp_path / "new" / "value.json")) == ["b", "a"]
    assert files.read_json(tmp_path / "new" / "value.json") == value


def test_nan_is_refused_and_the_old_file_stays(tmp_path: Path):
    file = tmp_path / "value.json"
    files.write_json(file, 1)
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(file, math.nan)
    assert files.read_json(file) == 1


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "value.txt"
    files.write_atomic(file, "old")

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        files.write_atomic(file, b"new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_written_files_have_ordinary_permissions(tmp_path: Path):
    files.write_atomic(tmp_path / "atomic", b"")
    (tmp_path / "ordinary").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "atomic").stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)
