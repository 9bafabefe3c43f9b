"""Real processes that work together over gloo, forked from one that has imported what they need.

Each has the variables that torchrun sets: to import torch and Lightning in every process would take most of the time.
"""

import faulthandler
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from tests.forked import CONTEXT, PRELOADED, free_port


def together(count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 280) -> None:
    """Call a function of a module in `count` processes. Raises AssertionError if one of them fails or does not end.

    Very seldom a thread of gloo's dies of SIGSEGV within malloc. Then all are started once more.
    """
    codes = exit_codes(count, function, *arguments, timeout=timeout)
    if -signal.SIGSEGV in codes:
        codes = exit_codes(count, function, *arguments, timeout=timeout)
    assert codes == [0] * count, f"exit codes by rank: {codes} (below 0: killed by this signal; None: hangs)"


def exit_codes(
    count: int, function: Callable[..., Any], *arguments: Any, timeout: float = 280, hanging: int | None = None
) -> list[int | None]:
    """Of `count` processes that call a function of a module; one alone has no variables of torchrun's.

    hanging: the one that will not end, so that nobody waits for it.
    """
    CONTEXT.set_forkserver_preload(PRELOADED)
    port = free_port()
    started = [
        CONTEXT.Process(target=_one, args=(rank, count, port, function, arguments), daemon=True)
        for rank in range(count)
    ]
    for process in started:
        process.start()
    try:
        for rank, process in enumerate(started):
            if rank != hanging:
                process.join(timeout)
        return [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()


def _one(rank: int, count: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    team = {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"},
        **{"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    }
    os.environ |= team if count > 1 else {}
    function(*arguments)
