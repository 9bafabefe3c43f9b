"""How the CPU multiplies float32 matrices: chosen, said, and always as exact as float32 is."""

import random

import pytest
import torch

from landmark.experiment.processor import set_up_processor
from landmark.utils import matmul
from landmark.utils.hardware import hardware


def test_the_probe_takes_no_precision_that_rounds():
    assert matmul.probe() in (matmul.HIGHEST, matmul.MEDIUM)
    assert torch.get_float32_matmul_precision() == "highest", "the probe leaves the setting as it was"
    matmul.set_matmul("auto")
    a, b = torch.randn(16, 102, 128), torch.randn(16, 128, 510)
    exact = a.double() @ b.double()
    assert ((a @ b).double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_a_record_says_what_was_chosen(configure, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads stay as they are
    for setting in ("medium", "highest"):
        set_up_processor(configure("trainer=cpu", f"trainer.matmul={setting}"))
        assert hardware()["matmul"] == setting
    set_up_processor(configure("trainer=cpu"))
    assert hardware()["matmul"] == matmul.probe()


@pytest.mark.parametrize(("gain", "chosen"), [(1.25, matmul.MEDIUM), (1.05, matmul.HIGHEST), (0.8, matmul.HIGHEST)])
def test_a_busy_machine_finds_what_an_idle_one_does(gain, chosen, monkeypatch):
    """Each time that is measured is up to three times too long, two out of three."""
    chance = random.Random(0)
    speed = {matmul.HIGHEST: 1.0, matmul.MEDIUM: gain}
    monkeypatch.setattr(matmul, "_error", lambda *_: 1e-7)
    monkeypatch.setattr(matmul, "_seconds", lambda a, b, precision: max(1.0, chance.uniform(0, 3)) / speed[precision])
    assert {matmul.probe.__wrapped__() for _ in range(50)} == {chosen}
