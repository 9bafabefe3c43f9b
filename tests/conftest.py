"""Triton's kernels are interpreted, so no GPU is needed; processes beside each other take one thread each.

Pages are opened in one browser.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hypothesis import settings
from omegaconf import DictConfig

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, which is when they are first run
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is

from landmark.experiment.config import Config, to_config
from landmark.utils.hardware import cores
from tests.browser import Browser
from tests.cli.shell import Here
from tests.configurations import compose_conf, row_record
from tests.workplace import Workplace, write_books

LONGEST = (  # of which each takes a minute or more; the pages are waited for
    *("serving/test_page.py", "tests/test_experiments.py", "tests/test_docs.py", "attacks/test_histories.py"),
    *("benchmarks/test_benchmarks.py", "tracking/test_tracker.py", "cli/test_launchers.py"),
)

gc.set_threshold(50_000, 50)  # to look through all modules for what is no longer used takes a tenth of the time
settings.register_profile("no deadlines", deadline=None)  # an example may be slow where other work shares the cores
settings.load_profile("no deadlines")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more process than cores: some tests wait for others."""
    return cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that no process works alone at the end."""
    items.sort(key=lambda item: "/".join(item.path.parts[-2:]) not in LONGEST)


@pytest.fixture(scope="session")
def processor() -> tuple[int, str]:
    """The threads and the precision of products with which this process began."""
    import torch  # after the environment is set

    return torch.get_num_threads(), torch.get_float32_matmul_precision()


@pytest.fixture(autouse=True)
def processor_as_before(processor: tuple[int, str]) -> Iterator[None]:
    """A row that is run in this process chooses both. In later tests sums would have other digits."""
    import torch

    yield
    threads, precision = processor
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """What nothing writes is NaN, and shows in a result that reads it."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; tests that ask for it are skipped, saying so, where there is none."""
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_books(tmp_path_factory.mktemp("books"))


@pytest.fixture
def work(books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """Tasks below a folder of its own, with stand-ins for training and evaluation."""
    return Workplace(books, tmp_path / "outputs", monkeypatch)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys) -> Iterator[Here]:
    """Commands in this process. What they leave in it, a log and the job at work, is as before afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Here(tmp_path, monkeypatch, capsys)
    HydraConfig.instance().cfg = None
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def composer() -> Callable[[list[str]], DictConfig]:
    return compose_conf


@pytest.fixture
def configure(composer) -> Callable[..., Config]:
    return lambda *overrides: to_config(composer(list(overrides)))


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    return row_record
