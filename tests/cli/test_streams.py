"""Closed, full and unread standard streams."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

RUN = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).parents[2] / 'run.py'))}"
PLAN = f"{RUN} +experiment=quickstart task=plan"
CASES = {  # a line of the shell, its exit code, and its last words
    "nobody reads": (f"{RUN} --help | head -1; echo ${{PIPESTATUS[0]}}", 0, "141"),
    "nobody reads a plan": (f"{PLAN} | true; echo ${{PIPESTATUS[0]}}", 0, "141"),
    "closed messages": (f"{RUN} task=nope 2>&-", 2, ""),
    "full messages": (f"{RUN} task=nope 2>/dev/full", 2, ""),
    "closed output": (f"{PLAN} >&-", 0, ""),
    "full output": (f"{PLAN} >/dev/full", 2, "No space left on device: make room"),
    "closed input": (f"{PLAN} <&-", 0, "missing"),
}


@pytest.mark.parametrize("case", CASES)
def test_no_stream_ends_in_a_traceback(tmp_path, case):
    line, code, said = CASES[case]
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_file_gets_no_messages_of_a_closed_stream(tmp_path):
    """The number of a closed stream would be that of the next file."""
    code = "import os, sys; from landmark.cli.streams import open_streams; open_streams(); file = open('data', 'w');"
    code += "print('data', file=file, flush=True); os.write(2, b'a message'); print('a message', file=sys.stderr)"
    subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" 2>&-'], cwd=tmp_path, check=True)
    assert (tmp_path / "data").read_text() == "data\n"
