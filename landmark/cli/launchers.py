"""Presets of Hydra's launchers: `python run.py -m … hydra/launcher=joblib`, `submitit_slurm` or `submitit_local`.

They complete the plugins' own schemas under the plugins' names: Hydra warns of a file in conf/ that has such a name.
"""

import ctypes
import importlib.util
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from landmark.utils.errors import UserError

PRESETS: dict[str, dict[str, Any]] = {
    # Processes of this machine, so many at a time.
    "joblib": {"n_jobs": 2},
    # An array, one task a job. A job that is preempted or runs out of time is queued again, and goes on from its last
    # checkpoint. One that trains on several GPUs (trainer=ddp) takes them on one node: hydra.launcher.gpus_per_node;
    # on several nodes it is started once for each GPU: hydra.launcher.nodes and .tasks_per_node (docs/cluster.md).
    "submitit_slurm": {
        "name": "landmark",
        "timeout_min": 24 * 60,
        "max_num_timeout": 20,  # times that a job which ran out of time is queued again
        "signal_delay_s": 120,  # from the signal to the end of the job
        "array_parallelism": 32,
        "gpus_per_node": 1,
        "cpus_per_task": 8,
        "stderr_to_stdout": True,
    },
    # A cluster tried out: processes of this machine, all at once.
    "submitit_local": {"name": "landmark", "timeout_min": 24 * 60, "stderr_to_stdout": True},
}
_DEATH_OF_PARENT = 1  # Linux's PR_SET_PDEATHSIG
_PACKAGES = {  # of a choice: its package, and the extra that has it
    "hydra/launcher=joblib": ("joblib", "launchers"),
    "hydra/launcher=submitit_slurm": ("submitit", "launchers"),
    "hydra/launcher=submitit_local": ("submitit", "launchers"),
    "hydra/sweeper=optuna": ("optuna", "optuna"),
}


def register() -> None:
    """Replace the schemas of the installed plugins by the presets."""
    Plugins.instance()  # imports the plugins
    store = ConfigStore.instance()
    for name in PRESETS.keys() & {file.removesuffix(".yaml") for file in store.list("hydra/launcher")}:
        schema = store.load(f"hydra/launcher/{name}.yaml").node
        store.store(group="hydra/launcher", name=name, node=OmegaConf.merge(schema, PRESETS[name]), provider="landmark")


def check(arguments: Sequence[str]) -> None:
    """Raise UserError where a command line names a launcher or a sweeper that is not installed."""
    for argument in set(arguments) & _PACKAGES.keys():
        package, extra = _PACKAGES[argument]
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{argument}: is not installed, pip install '.[{extra}]' installs it")


def end_with_parent() -> None:
    """Have Linux end a worker of joblib's with the command, even after SIGKILL: it would go on with its job, alone."""
    if multiprocessing.current_process().name != "MainProcess" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_OF_PARENT, signal.SIGKILL)


def is_lost(error: Exception) -> bool:
    """Whether the error says that a job of submitit ended without a result."""
    return type(error).__module__.partition(".")[0] == "submitit"
