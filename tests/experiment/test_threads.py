"""How many threads torch gets on a CPU."""

import pytest
import torch

from landmark.experiment.threads import THREADS, fastest, set_threads
from landmark.utils.files import read_json, write_json
from landmark.utils.hardware import cores


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


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
    set_threads(config, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)  # the weights are the same
    kept = read_json(tmp_path / THREADS)
    assert kept == {"threads": torch.get_num_threads(), "cores": cores()}
    for threads in (1, cores()):
        write_json(tmp_path / THREADS, {"threads": threads, "cores": cores()})
        set_threads(config, tmp_path)
        assert torch.get_num_threads() == threads
    write_json(tmp_path / THREADS, {"threads": 77, "cores": cores() + 1})  # began on another machine
    set_threads(config, tmp_path)
    assert torch.get_num_threads() <= cores()


def test_a_number_that_is_asked_for_is_not_measured(configure, tmp_path, monkeypatch):
    set_threads(configure("trainer.threads=1", "trainer=cpu"), tmp_path)
    assert torch.get_num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_threads(configure("trainer=cpu"), tmp_path)
    assert torch.get_num_threads() == 1
    assert not (tmp_path / THREADS).exists()
