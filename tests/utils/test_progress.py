"""Progress bars."""

import os
import sys
from types import SimpleNamespace

import pytest

from landmark.training.progress_callback import ProgressCallback
from landmark.utils.progress import ProgressBar


def bar_of_a_training():
    shown = ProgressCallback(SimpleNamespace(steps=9), "reading")  # pyright: ignore[reportArgumentType]
    shown.on_train_start(SimpleNamespace(global_step=0, is_global_zero=True), None)  # pyright: ignore
    return shown._bar


@pytest.mark.parametrize("make", [bar_of_a_training, lambda: ProgressBar("reading").bar])
def test_a_terminal_that_says_it_has_no_size_shows_progress(make, monkeypatch):
    """As a new pseudo-terminal does."""
    ours, terminal = os.openpty()
    os.set_blocking(ours, False)
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        bar = make()
        bar.delay = 0
        bar.refresh()
        assert b"reading" in os.read(ours, 1000)
        bar.close()
    os.close(ours)
