"""One training by several processes; tests/experiment/training compares it with one, test_launchers.py has srun's."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from landmark.experiment.runs import runner
from landmark.experiment.runs.runner import set_up_processor
from landmark.utils.files import read_json
from landmark.utils.hardware import hardware
from landmark.utils.team import Team, started_together
from tests import configurations
from tests.experiment.runs.processes_case import part
from tests.forked import TORCHRUN, Started, free_port
from tests.together import exit_codes

ROOT = Path(__file__).parents[3]


LOST = "error: the connection with another process was lost ("


@pytest.mark.parametrize(
    ("case", "codes", "said"),
    [
        ("1 stops", [2, None, 2], [f"{LOST}[Rank 0]: Ranks 1 failed to pass", None, LOST]),
        ("1 is absent", [2, 3, 2], [LOST, None, LOST]),
        ("1 is killed", [2, -signal.SIGKILL, 2], [LOST, None, LOST]),
        ("0 refuses", [2, 2, 2], ["error: train.steps=-1: must be at least 1", "", ""]),
        ("0 evaluates", [0, 0, 0], ["", "", ""]),  # longer than the others wait for it in a training
    ],
)
def test_who_is_missing_ends_the_others(tmp_path, case, codes, said):
    """In one line; the first process names others that do not answer."""
    assert exit_codes(3, part, tmp_path, case, hanging=codes.index(None) if None in codes else None) == codes
    for rank, expected in enumerate(said):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        lines = [line for line in lines if line.startswith(("error", "Trace"))]
        if expected is not None:
            assert len(lines) == bool(expected)
            assert "".join(lines).startswith(expected)


TINY = [
    *(*configurations.TINY, "row=plain_512", "train.steps=6", "train.validate_every=6", "train.checkpoint_every=2"),
    *("train.log_every=1", "trainer=ddp", "trainer.accelerator=cpu"),
]


def start(*arguments, **variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return Started(list(arguments), ROOT, environment)


def trained(output: Path):
    """Weights and record of the one run, and the record of the one row."""
    (run,), (record,), (row,) = (list(output.glob(name)) for name in ("runs/*", "records/runs/*", "records/rows/*"))
    return load_file(run / "model.safetensors"), read_json(record), read_json(row)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """What two machines made, each below a folder of its own, and printed: two agents of torchrun on one port."""
    folder = tmp_path_factory.mktemp("torchrun")
    torchrun = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    started = [start(*torchrun, f"--node-rank={n}", "run.py", *TINY, f"output={folder / str(n)}") for n in range(2)]
    printed = []
    for process in started:
        done = process.wait()
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return folder, printed


def test_a_command_on_two_machines(machines):
    """The first evaluates and prints; the second makes nothing, and nothing is told to it through files."""
    folder, (printed, other) = machines
    _, record, row = trained(folder / "0")
    assert record["results"]["steps"] == 6
    assert row["results"]["tokens"] == 8192
    assert "plain_512" in printed
    assert other == ""
    assert not [path for path in (folder / "1").rglob("*") if path.is_file()]


def test_a_command_on_two_devices_names_the_one_that_starts_them(tmp_path):
    done = start("run.py", *TINY, "trainer.devices=2", f"output={tmp_path}").wait()
    assert done.returncode == 2
    said = "2 devices train in as many processes: start them by `torchrun --standalone --nproc-per-node=2 run.py "
    assert said in done.stderr


def test_a_killed_process_is_restarted_and_goes_on(machines, tmp_path):
    """From its last checkpoint, bit for bit: SIGKILL of the second process after step 5. No thread is left."""
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [
        "tests/experiment/runs/processes_case.py",
        str(tmp_path / "killed"),
        *TINY,
        f"output={tmp_path / 'output'}",
    ]
    # Else PyTorch keeps one store for all starts, and a process may read from it where the killed ones listened.
    done = start(*torchrun, *command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1").wait()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "going on at step 4" in done.stderr
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
    assert Team(5, 8, 4).machines == 2


def test_products_are_as_exact_as_float32_weights_the_same_and_a_record_says_how_they_are_computed(
    configure, monkeypatch
):
    state = torch.get_rng_state()
    set_up_processor(configure("trainer=cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    a, b = torch.randn(16, 102, 128), torch.randn(16, 128, 510)
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).abs().max() <= 2e-6 * exact.abs().max()
    for is_exact, chosen in ((True, "medium"), (False, "highest")):
        monkeypatch.setattr("landmark.utils.hardware._is_onednn_exact", lambda is_exact=is_exact: is_exact)
        set_up_processor(configure("trainer=cpu"))
        assert hardware()["matmul"] == chosen


def test_threads_are_torchs_own_or_those_asked_for_and_processes_share_the_cores(configure, monkeypatch):
    torch.set_num_threads(3)
    set_up_processor(configure("trainer=cpu"))
    assert hardware()["threads"] == 3
    set_up_processor(configure("trainer=cpu", "trainer.threads=2"))
    assert hardware()["threads"] == 2
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner, "cores", lambda: 8)
    for name, value in zip(("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"), "2221", strict=True):
        monkeypatch.setenv(name, value)
    set_up_processor(configure("trainer=cpu"))
    assert torch.get_num_threads() == 4
