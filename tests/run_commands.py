"""Runs commands as a shell would, in one process: starting Python takes longer than most of them.

`python -m tests.run_commands COMMANDS RESULTS`: JSON, lists of words after `python`; of each its code and output."""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


def run(words: list[str]) -> dict[str, object]:
    """One command. run=DIR: the newest landmark run."""
    runs = sorted(Path("outputs/runs").glob("landmark-*"), key=lambda path: path.stat().st_mtime)
    sys.argv = [word.replace("run=DIR", f"run={runs[-1]}") if runs else word for word in words]
    said, messages, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(messages):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
    return {"code": code, "said": said.getvalue(), "messages": messages.getvalue()}


if __name__ == "__main__":
    commands, results = map(Path, sys.argv[1:])
    sys.path.insert(0, "")
    results.write_text(json.dumps([run(words) for words in json.loads(commands.read_text())]))
