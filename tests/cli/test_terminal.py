"""A terminal gets no commands from the names in a folder of results that somebody else has made."""

import errno
import logging.config
import os
import pty
import subprocess
import sys

import pytest

from landmark.cli.terminal import said
from tests.cli.shell import RUN

NAME = "landmark-\x1b]0;mine\x07-\x9b2J"


def test_control_characters_of_names_are_shown_as_text(tmp_path):
    (tmp_path / "outputs" / "records" / "rows").mkdir(parents=True)
    (tmp_path / "outputs" / "records" / "rows" / f"{NAME}.json").write_text("{}")
    terminal, other = pty.openpty()
    words = [sys.executable, str(RUN), "task=status", f"output={tmp_path / 'outputs'}"]
    with subprocess.Popen(words, stdout=other, stderr=other, cwd=tmp_path) as started:
        os.close(other)
        said = b""
        while started.poll() is None or said[-1:] != b"\n":
            try:
                said += os.read(terminal, 1 << 16)
            except OSError:  # closed by the command's end
                break
    os.close(terminal)
    assert rb"landmark-\x1b]0;mine\x07-\x9b2J.json" in said
    assert not {0x1B, 0x07} & set(said)
    assert "\x9b".encode() not in said


def test_a_file_of_logging_that_cannot_be_opened_says_why(tmp_path):
    """Hydra's logging hides the system's error behind one of its own."""
    handler = {"class": "logging.FileHandler", "filename": str(tmp_path / "nowhere" / "landmark.log")}
    with pytest.raises(ValueError, match="handler") as error:
        logging.config.dictConfig({"version": 1, "handlers": {"file": handler}})
    cause = error.value.__cause__
    assert isinstance(cause, OSError)
    cause.errno, cause.strerror = errno.EROFS, "Read-only file system"
    assert "landmark.log: Read-only file system: make room, or name another output=" in (said(error.value) or "")


def test_settings_that_are_not_utf8_are_named(tmp_path, here):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_bytes(b"# @package _global_\nseed: \xa0\n")
    ended = here("--config-dir", str(tmp_path), "+experiment=own", "task=plan")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "in conf or --config-dir, is not UTF-8" in ended.err
