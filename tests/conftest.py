"""Triton's kernels are interpreted in the tests, which so need no GPU; processes beside each other take one thread
each; pages are opened in one browser."""

import os
from collections.abc import Iterator

import pytest

from tests.browser import Browser

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is when they are first run
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; tests that ask for it are skipped, saying so, where there is none."""
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
