"""Jobs beside each other: submitit's own processes and joblib's for real, Slurm by a stand-in for its commands."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from landmark.utils.files import read_json
from tests.configurations import TINY
from tests.forked import free_port, python, wait_for

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
ROOT = Path(__file__).parents[2]
SBATCH = """#!/bin/bash
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
export SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
if [[ -z $last ]]; then
  SLURM_JOB_ID=7 bash "$1" >/dev/null 2>&1 &
else
  export SLURM_ARRAY_JOB_ID=7
  (for task in $(seq 0 "$last"); do SLURM_JOB_ID=7$task SLURM_ARRAY_TASK_ID=$task bash "$1"; done) >/dev/null 2>&1 &
fi
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  [[ $1 == --output ]] && shift && output=${1//%A_%a/7_$SLURM_ARRAY_TASK_ID}
  shift
done
if [[ $NODES ]]; then
  export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_NNODES=2 SLURM_NODELIST=127.0.0.1
fi
output=${output//%j/$SLURM_JOB_ID}
for node in ${NODES:-0}; do
  SLURM_PROCID=$node SLURM_NODEID=$node SLURM_LOCALID=0 "$@" >"${output//%t/$node}" 2>&1 &
done
wait
"""
SACCT = """#!/bin/bash
printf 'JobID|State|NodeList\\n7|RUNNING|here\\n7_0|RUNNING|here\\n7_1|RUNNING|here\\n'
"""


def start(*arguments, environment=None):
    return python("run.py", *arguments, cwd=ROOT, env=environment)


def test_first_trains_then_evaluates(tmp_path):
    """A row's job refuses to train, and names the command that does; after it the same job succeeds."""
    rows = ["-m", *TINY, f"output={tmp_path}", "row=plain_512", "hydra/launcher=submitit_local"]
    refused = start(*rows)
    assert refused.returncode == 2
    said = re.search(r"^error: row plain_512: its run is not trained yet, `(.*)` trains it$", refused.stderr, re.M)
    assert said, refused.stderr
    assert not (tmp_path / "runs").exists()

    python, program, *arguments = shlex.split(said[1])
    assert (python, program) == ("python", "run.py")
    assert {"task=train", "-m", "hydra/launcher=submitit_local"} < set(arguments)
    trained = start(*arguments)
    assert trained.returncode == 0, trained.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run={run.name}" in arguments

    evaluated = start(*rows)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "written: " in evaluated.stdout  # the table, when all jobs are done
    (record,) = (tmp_path / "records" / "rows").iterdir()
    alone = shlex.join(["python", "run.py", *TINY, f"output={tmp_path}", "row=plain_512"])
    assert read_json(record)["provenance"]["command"] == alone


def slurm(folder, **variables):
    """An environment in which Slurm's commands are stand-ins. NODES: two of them, else one."""
    tools = folder / "bin"
    tools.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"} | variables


def test_slurm_gets_an_array(tmp_path):
    arguments = ["-m", *TINY, f"output={tmp_path}", "task=plan", "row=plain_512,landmark_2048"]
    cluster = ["hydra/launcher=slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=4"]
    done = start(*arguments, *cluster, environment=slurm(tmp_path))
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("multirun/*/*/.submitit")
    script = (folder / "7" / "7_submission.sh").read_text()
    asked = {"array=0-1%2", "gpus-per-node=4", "partition=gpu", "time=1440", "signal=USR2@120", "ntasks-per-node=1"}
    assert asked <= set(re.findall(r"^#SBATCH --(.*)$", script, re.M))
    for task in (0, 1):
        assert "missing: 1 run, 1 row" in (folder / f"7_{task}" / f"7_{task}_0_log.out").read_text()


def test_a_job_of_slurm_trains_on_two_machines(tmp_path):
    """A process on each, of which the first prepares, tells the other what to train, and writes the record."""
    arguments = ["-m", *TINY, f"output={tmp_path}", "task=train", "row=plain_512", "trainer=ddp"]
    cluster = ["hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1"]
    environment = slurm(tmp_path, NODES="0 1", MASTER_PORT=str(free_port()))
    done = start(*arguments, *cluster, "trainer.accelerator=cpu", environment=environment)
    (folder,) = tmp_path.glob("multirun/*/*/.submitit/7")
    logs = [file.read_text() for file in sorted(folder.glob("7_*_log.*"))]
    assert done.returncode == 0, (done.stderr, logs)
    assert "#SBATCH --nodes=2" in (folder / "7_submission.sh").read_text()
    (record,) = (tmp_path / "records" / "runs").iterdir()
    assert read_json(record)["results"]["steps"] == 2
    first, second = ("".join(file.read_text() for file in folder.glob(f"7_{node}_log.*")) for node in (0, 1))
    assert "training for 2 steps" in first
    assert "training for 2 steps" not in second
    assert {file.name for file in folder.glob("*_result.pkl")} == {"7_0_result.pkl", "7_1_result.pkl"}


def test_workers_of_joblib_end_with_the_command(tmp_path):
    long = ["train.steps=100000", "train.log_every=1", "train.validate_every=100000", "task=train"]
    arguments = ["-m", *TINY, f"output={tmp_path}", *long, "seed=1,2", "hydra/launcher=joblib"]
    command = subprocess.Popen([sys.executable, "run.py", *arguments], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    wait_for(lambda: len(list(tmp_path.glob("runs/*/metrics.csv"))) == 2)
    workers = [each for each in children(command.pid) if "loky" in Path(f"/proc/{each}/cmdline").read_text()]
    assert len(workers) >= 2
    command.send_signal(signal.SIGKILL)
    _, printed = command.communicate(timeout=60)
    assert "Traceback" not in printed
    wait_for(lambda: not any(os.path.exists(f"/proc/{each}") for each in workers))


def children(process):
    return [int(each) for file in Path(f"/proc/{process}/task").glob("*/children") for each in file.read_text().split()]
