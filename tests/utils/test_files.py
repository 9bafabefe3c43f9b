import errno
import math
import os
import stat
from pathlib import Path

import pytest

from landmark.utils import files


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
