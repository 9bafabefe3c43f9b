"""The command line in one of several processes, the last of which kills itself once, after step 5.

python tests/experiment/killed_once.py MARK ARGUMENTS…: it leaves the file MARK when it does. When Python ends, each
process leaves the file MARK.RANK.threads with the names of its threads.
"""

import atexit
import os
import signal
import sys
from pathlib import Path

from landmark.cli.main import main
from landmark.training.progress_callback import ProgressCallback
from landmark.utils.team import started_together


def kill_once(mark: Path) -> None:
    team = started_together()
    is_last = team.rank == team.size - 1
    shown = ProgressCallback.on_train_batch_end

    def show_and_die(self, trainer, *arguments):
        shown(self, trainer, *arguments)
        if trainer.global_step == 5 and is_last and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    ProgressCallback.on_train_batch_end = show_and_die


def write_threads(file: Path) -> None:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    file.write_text("\n".join(names))


if __name__ == "__main__":
    mark = Path(sys.argv.pop(1))
    kill_once(mark)
    atexit.register(write_threads, mark.with_name(f"{mark.name}.{os.environ['RANK']}.threads"))  # after those of main
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
