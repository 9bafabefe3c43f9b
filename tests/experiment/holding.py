"""A process that holds a lock of an output folder."""

import subprocess
import sys
from pathlib import Path

HOLD = """
import sys, time
from landmark.experiment.records import Records
with Records(sys.argv[1]).lock(sys.argv[2], sys.argv[3]):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(output: Path, kind: str, identity: str) -> subprocess.Popen:
    """Start it, and wait until it holds the lock of a run or a row until it is killed."""
    command = [sys.executable, "-c", HOLD, str(output), kind, identity]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "held"
    return process
