"""A terminal gets no commands from the names in a folder of results that somebody else has made."""

import os
import pty
import subprocess
import sys

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
