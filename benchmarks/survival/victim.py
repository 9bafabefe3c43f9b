"""A process of run.py whose stage is observed, and which is killed together with its children."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGES = ("prepare", "train transformer", "train landmark", "train transformer_xl", "evaluate", "table")


class Victim:
    """A process of `python run.py +experiment=survival`; outputs go to `folder`/outputs, messages to `folder`/`log`.

    Its messages and the locks that it holds (in /proc/locks) show its stage.
    """

    def __init__(
        self, folder: Path, overrides: Sequence[str] = (), log: str = "log", prepared_bytes: float = math.inf
    ) -> None:
        """prepared_bytes: size of all tokens after preparation."""
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "outputs"
        self.prepared_bytes = prepared_bytes
        self._log = folder / log
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        with open(self._log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "run.py"), "+experiment=survival", *overrides],
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started = time.monotonic()

    def text(self) -> str:
        """The messages of this process so far."""
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            return file.read().decode()

    def stage(self) -> str | None:
        """One of STAGES; None while it loads modules, and between two stages."""
        held = locks_held(self.process.pid, self.output)
        for lock in held:
            if lock.parent.name == "data":
                return "prepare"
            kind, _, identity = lock.stem.partition("-")
            if kind == "rows":
                return "evaluate"
            run = re.search(rf"^((\w+)-\S+-{identity}): training for", self.text(), re.MULTILINE)
            return f"train {run[2]}" if run else None
        lines = [line for line in self.text().splitlines() if line.startswith("[")]
        done, _, of = lines[-1][1 : lines[-1].index("]")].partition("/") if lines else ("", "", "all")
        return "table" if done == of else None

    def wait_for(self, stage: str, before: Sequence[str] = (), progress: float = 0.0) -> bool:
        """Wait for a moment in a stage. Returns False if the process reaches another stage, or its end, instead.

        Args:
            stage: one of STAGES.
            before: stages that may come before it.
            progress: share of the stage: of the bytes written in prepare, of the steps logged in a training. Other
                stages have no progress.
        """
        while self.process.poll() is None:
            now = self.stage()
            if now not in (None, stage, *before):
                return False
            if now == stage and self._progress(stage) >= progress:
                return True
            time.sleep(0.005)
        return False

    def _progress(self, stage: str) -> float:
        if stage == "prepare":
            written = sum(path.stat().st_size for path in self.output.glob("data/*/*.bin"))
            return written / self.prepared_bytes
        if not stage.startswith("train "):
            return 1.0
        kind = stage.removeprefix("train ")
        steps = re.findall(rf"^{kind}-\S+: training for (\d+) steps", self.text(), re.MULTILINE)
        metrics = [path.read_bytes() for path in self.output.glob(f"runs/{kind}-*/metrics.csv")]
        logged = re.findall(rb"^(\d+),", metrics[0], re.MULTILINE) if metrics else []
        return int(logged[-1]) / int(steps[-1]) if logged else 0.0

    def kill(self) -> tuple[str | None, bool]:
        """Send SIGKILL to its process group. Returns its stage, and whether it was alive."""
        self._signal(signal.SIGSTOP)
        stage = self.stage()
        self._signal(signal.SIGKILL)
        return stage, self.process.wait() == -signal.SIGKILL

    def finish(self) -> float:
        """Wait for its end. Returns the seconds it took; raises RuntimeError with its messages if it failed."""
        if code := self.process.wait():
            raise RuntimeError(f"run.py ended with {code}:\n{self.text()}")
        return time.monotonic() - self.started

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def lock_files(output: Path) -> list[Path]:
    return sorted([*output.glob("data/.*.lock"), *output.glob("locks/*.lock")])


def locks_held(process: int, output: Path) -> list[Path]:
    """Lock files below an output folder that a process holds."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    inodes = {int(words[5].rpartition(":")[2]) for words in lines if words[1] == "FLOCK" and words[4] == str(process)}
    return [path for path in lock_files(output) if path.stat().st_ino in inodes] if inodes else []
