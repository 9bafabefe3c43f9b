"""One command on several machines: two agents of torchrun. test_launchers.py does so with srun's variables."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from landmark.experiment.team import for_team
from landmark.utils.errors import UserError
from landmark.utils.files import read_json
from landmark.utils.team import Team, started_together
from tests.training.training_case import make_config

ROOT = Path(__file__).parents[2]
TINY = [
    *("+experiment=quickstart", "row=plain_512", "data.max_documents=6", "eval.tokens=8192", "logger=csv"),
    *("model.num_layers=1", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32", "trainer.threads=1"),
    *("train.steps=6", "train.batch_size=2", "train.validate_every=6", "train.validate_batches=1"),
    *("train.checkpoint_every=2", "train.log_every=1", "trainer=ddp", "trainer.accelerator=cpu"),
]


def start(*arguments, **variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ended(process) -> str:
    printed, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return printed


def trained(output: Path):
    """Weights and record of the one run, and the record of the one row."""
    (run,), (record,), (row,) = (list(output.glob(name)) for name in ("runs/*", "records/runs/*", "records/rows/*"))
    return load_file(run / "model.safetensors"), read_json(record), read_json(row)


def by_torchrun(folder: Path) -> list[subprocess.Popen]:
    """Two "machines", which are two agents of torchrun on one port, with a process each."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    torchrun += [f"--master-port={free_port()}"]
    return [start(*torchrun, f"--node-rank={n}", "run.py", *TINY, f"output={folder / str(n)}") for n in range(2)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """What two machines made, each below a folder of its own, and printed."""
    folder = tmp_path_factory.mktemp("torchrun")
    return folder, [ended(process) for process in by_torchrun(folder)]


def test_a_command_on_two_machines(machines):
    """The first evaluates and prints; the second makes nothing, and nothing is told to it through files."""
    folder, (printed, other) = machines
    _, record, row = trained(folder / "0")
    assert record["results"]["steps"] == 6
    assert row["results"]["tokens"] == 8192
    assert "plain_512" in printed
    assert other == ""
    assert not [path for path in (folder / "1").rglob("*") if path.is_file()]


def test_a_killed_process_is_restarted_and_goes_on(machines, tmp_path):
    """From its last checkpoint, bit for bit: SIGKILL of the second process after step 5. No thread is left."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = ["-m", "tests.cli.team_case", str(tmp_path / "killed"), *TINY, f"output={tmp_path / 'output'}"]
    # Else PyTorch keeps one store for all starts, and a process may read from it where the killed ones listened.
    process = start(*torchrun, *command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert (tmp_path / "killed").exists()
    assert "going on at step 4" in errors
    ours, expected = trained(tmp_path / "output"), trained(machines[0] / "0")
    assert all(torch.equal(weight, expected[0][name]) for name, weight in ours[0].items())
    assert ours[2]["results"]["nll"] == expected[2]["results"]["nll"]
    threads = [(tmp_path / f"killed.{rank}.threads").read_text().split() for rank in range(2)]
    assert all(threads)
    assert not [name for names in threads for name in names if "gloo" in name]  # one that is left may abort the process


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("variables", "team"),
    [
        (SRUN, Team(5, 8, 4)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a script of sbatch, without srun
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Team(3, 4, 2)),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, None),
    ],
)
def test_who_was_started_together(monkeypatch, variables, team):
    for name in [name for name in os.environ if re.match("SLURM_|TORCHELASTIC_|RANK$|(LOCAL_)?WORLD_SIZE$", name)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert started_together() == team


def test_the_machines_of_a_team():
    config = make_config("transformer")
    assert for_team(config, Team(5, 8, 4)).trainer.devices == 4
    assert for_team(config, Team(5, 8, 4)).trainer.num_nodes == 2
    config.trainer.num_nodes = 3
    with pytest.raises(UserError, match=r"trainer\.num_nodes=3: 8 processes were started on 2 machines"):
        for_team(config, Team(5, 8, 4))


def test_several_machines_are_refused_alone(tmp_path):
    process = start("run.py", *TINY, "trainer.num_nodes=2", f"output={tmp_path}")
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 2
    assert "error: trainer.num_nodes=2: this process is alone; start the command on every machine" in errors
