import sys

import pytest
import torch

from landmark.lab.peak_memory import peak_memory_bytes, reset_peak_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="cannot be reset elsewhere")
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the GPU's memory")
def test_an_earlier_phase_does_not_count():
    reset_peak_memory()
    before = peak_memory_bytes()
    torch.ones(30_000_000)
    assert peak_memory_bytes() > before + 100e6
    reset_peak_memory()
    assert peak_memory_bytes() < before + 100e6
