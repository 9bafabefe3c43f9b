"""How many threads torch gets on a CPU, and how it multiplies."""

import pytest
import torch

from landmark.experiment.processor import PROCESSOR, fastest, set_up_processor
from landmark.utils.files import read_json, write_json
from landmark.utils.hardware import cores, hardware


@pytest.fixture(autouse=True)
def threads_are_chosen(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: [2.0, 2.1, 2.0], 2: [1.1, 1.0, 9.0]}, 2),  # two idle cores, once interrupted
        ({1: [2.0, 2.1, 2.0], 2: [19.0, 21.0, 1.0]}, 1),  # two busy ones
        ({1: [2.0], 2: [2.1]}, 2),  # no matter
        ({1: [4.0], 4: [1.0], 8: [3.0]}, 4),
    ],
)
def test_the_fastest_number_is_taken(seconds, chosen):
    assert fastest(seconds) == chosen


@pytest.mark.skipif(cores() == 1, reason="one core leaves no choice")
def test_a_number_is_measured_kept_and_taken_again(configure, tmp_path):
    config = configure("size=nano", "trainer=cpu")
    state = torch.get_rng_state()
    set_up_processor(config, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)  # the weights are the same
    kept, found = read_json(tmp_path / PROCESSOR), hardware()
    assert kept == {name: found[name] for name in ("cpu", "cores", "threads", "matmul")}
    for threads, matmul in ((1, "medium"), (cores(), "highest")):
        write_json(tmp_path / PROCESSOR, kept | {"threads": threads, "matmul": matmul})
        set_up_processor(config, tmp_path)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, matmul)
    write_json(tmp_path / PROCESSOR, kept | {"threads": 77, "cores": cores() + 1})  # began on another machine
    set_up_processor(config, tmp_path)
    assert torch.get_num_threads() <= cores()


def test_a_number_that_is_asked_for_is_not_measured(configure, tmp_path, monkeypatch):
    set_up_processor(configure("trainer.threads=1", "trainer.matmul=medium", "trainer=cpu"), tmp_path)
    assert torch.get_num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_up_processor(configure("trainer.matmul=medium", "trainer=cpu"), tmp_path)
    assert torch.get_num_threads() == 1
    assert torch.get_float32_matmul_precision() == "medium"


def test_a_training_goes_on_with_what_was_asked_for_when_it_began(configure, tmp_path, monkeypatch):
    begun, resumed = configure("trainer=cpu", "trainer.threads=3", "trainer.matmul=medium"), configure("trainer=cpu")
    set_up_processor(begun, tmp_path / "asked")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # torch has 3 already
    set_up_processor(configure("trainer=cpu", "trainer.matmul=medium"), tmp_path / "environment")
    monkeypatch.delenv("OMP_NUM_THREADS")
    for folder in ("asked", "environment"):
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        set_up_processor(resumed, tmp_path / folder)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (3, "medium")
        set_up_processor(configure("trainer=cpu", "trainer.threads=2", "trainer.matmul=highest"), tmp_path / folder)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "highest")


LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "{rank}"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "{rank}"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_together_do_not_probe_and_the_first_one_writes(launcher, configure, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("landmark.utils.matmul.probe", lambda: "medium")  # what another process may find
    monkeypatch.setattr("landmark.experiment.processor._choose", lambda config: pytest.fail("probed"))
    monkeypatch.setattr("landmark.experiment.processor.cores", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for rank in "10":
        for name, value in LAUNCHERS[launcher].items():
            monkeypatch.setenv(name, value.format(rank=rank))
        set_up_processor(configure("trainer=cpu"), tmp_path)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (4, "highest")
        assert (tmp_path / PROCESSOR).exists() == (rank == "0")
    assert read_json(tmp_path / PROCESSOR).items() >= {"threads": 4, "matmul": "highest"}.items()
