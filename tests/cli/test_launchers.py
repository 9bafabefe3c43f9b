"""Jobs beside each other: submitit's own processes and joblib's for real, Slurm by a stand-in for its commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from landmark.cli import launchers
from landmark.utils.errors import UserError
from landmark.utils.files import read_json

pytest.importorskip("submitit")
pytest.importorskip("joblib")
ROOT = Path(__file__).parents[2]
TINY = [
    *("+experiment=quickstart", "data.max_documents=6", "eval.tokens=8192", "logger=csv", "trainer=cpu"),
    *("model.num_layers=1", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32", "trainer.threads=1"),
    *("train.steps=2", "train.batch_size=2", "train.validate_every=2", "train.validate_batches=1"),
]
SBATCH = """#!/bin/bash
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\)%.*/\\1/p' "$1")
export SLURM_ARRAY_JOB_ID=7 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
(for task in $(seq 0 "$last"); do SLURM_JOB_ID=7$task SLURM_ARRAY_TASK_ID=$task bash "$1"; done) >/dev/null 2>&1 &
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  [[ $1 == --output ]] && shift && output=${1//%A_%a/7_$SLURM_ARRAY_TASK_ID}
  shift
done
"$@" >"${output//%t/0}" 2>&1
"""
SACCT = """#!/bin/bash
printf 'JobID|State|NodeList\\n7_0|RUNNING|here\\n7_1|RUNNING|here\\n'
"""


def start(*arguments, environment=None):
    command = [sys.executable, "run.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment)


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


def test_slurm_gets_an_array(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    arguments = ["-m", *TINY, f"output={tmp_path}", "task=plan", "row=plain_512,landmark_2048"]
    cluster = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=4"]
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = start(*arguments, *cluster, environment=environment)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "sweeps" / ".submitit"
    script = (folder / "7" / "7_submission.sh").read_text()
    asked = {"array=0-1%2", "gpus-per-node=4", "partition=gpu", "time=1440", "signal=USR2@120", "ntasks-per-node=1"}
    assert asked <= set(re.findall(r"^#SBATCH --(.*)$", script, re.M))
    for task in (0, 1):
        assert "missing: 1 runs, 1 rows" in (folder / f"7_{task}" / f"7_{task}_0_log.out").read_text()


def test_joblib_works_on_each(tmp_path):
    arguments = ["-m", *TINY, f"output={tmp_path}", "task=plan", "row=plain_512,landmark_2048"]
    done = start(*arguments, "hydra/launcher=joblib")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("missing: 1 runs, 1 rows") == 2


def test_launcher_that_is_not_installed(monkeypatch):
    launchers.check(["-m", "hydra/launcher=joblib", "row=a"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"hydra/launcher=joblib: is not installed, pip install '\.\[launchers\]'"):
        launchers.check(["-m", "hydra/launcher=joblib", "row=a"])
