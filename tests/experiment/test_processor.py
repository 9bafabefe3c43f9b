"""How many threads torch gets on a CPU, and how it multiplies."""

import pytest
import torch

from landmark.experiment import runner
from landmark.experiment.runner import set_up_processor
from landmark.utils.hardware import hardware


def test_products_are_as_exact_as_float32_and_weights_the_same(configure):
    state = torch.get_rng_state()
    set_up_processor(configure("trainer=cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    a, b = torch.randn(16, 102, 128), torch.randn(16, 128, 510)
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize(("is_exact", "chosen"), [(True, "medium"), (False, "highest")])
def test_a_record_says_how_products_are_computed(configure, monkeypatch, is_exact, chosen):
    monkeypatch.setattr(runner, "_is_onednn_exact", lambda: is_exact)
    set_up_processor(configure("trainer=cpu"))
    assert hardware()["matmul"] == chosen


def test_threads_are_torchs_own_or_those_that_are_asked_for(configure):
    torch.set_num_threads(3)
    set_up_processor(configure("trainer=cpu"))
    assert hardware()["threads"] == 3
    set_up_processor(configure("trainer=cpu", "trainer.threads=2"))
    assert hardware()["threads"] == 2


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}


def test_processes_together_share_the_cores(configure, monkeypatch):
    """tests/experiment/test_processes.py has the variables of other launchers."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner, "cores", lambda: 8)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    set_up_processor(configure("trainer=cpu"))
    assert torch.get_num_threads() == 4
