"""Processes that train nothing: each leaves its id in the folder, then waits, or fails as how.json there says.

Run as a script it starts two of them: `python -m tests.experiment.processes_case FOLDER start`.
"""

import os
import sys
import time
from pathlib import Path

from landmark.experiment.processes import errors_left_in, train_together
from landmark.utils.errors import UserError
from landmark.utils.files import read_json


def wait_or_fail(folder: Path) -> None:
    with errors_left_in(folder):
        rank, how = os.environ["RANK"], read_json(folder / "how.json")
        (folder / f"rank{rank}").write_text(str(os.getpid()))
        if rank == "1" and how == "mistake":
            raise RuntimeError("a mistake")
        if rank == "1" and how == "refused":
            raise UserError("train.length=0: no text")
        if rank == "1" and how == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(60)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if sys.argv[2:] == ["start"]:
        train_together("tests.experiment.processes_case", where, 2)
    else:
        wait_or_fail(where)
