"""`python …` in a process that is forked from one which has imported PyTorch and Lightning: a command takes a second.

Only for what neither measures imports nor reads another copy of the package.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
TORCHRUN = ["-m", "torch.distributed.run", "--run-path", "--start-method=fork"]  # its processes import nothing anew
PRELOADED = [
    "tests.experiment.training.training_case",
    "landmark.cli.main",
    "landmark.memory",
    "torch.distributed.tensor",
    "wandb.sdk.launch",  # which every run of W&B imports
]


class Started:
    """A command that has been started. Its output goes to files."""

    def __init__(self, words: list[str], cwd: str | Path, env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.words, self.files = words, [Path(self._folder.name, name) for name in ("out", "err")]
        CONTEXT.set_forkserver_preload(PRELOADED)
        self.process = CONTEXT.Process(target=_run, args=(words, str(cwd), dict(env), *map(str, self.files)))
        self.process.start()

    def wait(self, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        """Its exit code and what it printed. Raises TimeoutError, and ends it, where it takes longer."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.files[1].read_text())
        out, err = (file.read_text() for file in self.files)
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.words, self.process.exitcode, out, err)


def python(*words: str, cwd: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Carry out `python WORDS` in a folder: a script, -m and a module, or -c and code. env: None: this process's."""
    return Started(list(words), cwd, os.environ if env is None else env).wait()


def wait_for(found: Callable[[], object], seconds: float = 120) -> None:
    """Until something is true."""
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until, f"it is not so after {seconds} seconds"
        time.sleep(0.02)


def hold(output: Path, kind: str, identity: str) -> BaseProcess:
    """Start a process, and wait until it holds the lock of a run or a row below an output folder until it is killed."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    held = CONTEXT.Event()
    process = CONTEXT.Process(target=_hold, args=(output, kind, identity, held), daemon=True)
    process.start()
    assert held.wait(250)
    return process


def _hold(output: Path, kind: Any, identity: str, held: Any) -> None:
    from landmark.experiment.runs.records import Records

    with Records(output).lock(kind, identity):
        held.set()
        time.sleep(600)


def _run(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    for number, file in enumerate((os.devnull, out, err)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    try:
        if words[0] == "-c":
            sys.argv, sys.path[0:0] = ["-c", *words[2:]], [""]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            sys.argv, sys.path[0:0] = words[1:], [cwd]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0:0] = words, [os.path.dirname(os.path.abspath(words[0]))]
            runpy.run_path(words[0], run_name="__main__")
    finally:  # which multiprocessing leaves out
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
