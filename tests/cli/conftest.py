"""The command line in a folder of its own."""

import logging
from collections.abc import Iterator

import pytest

from landmark.config.command_line import StartedJob, begin
from tests.cli.shell import Here


@pytest.fixture
def here(tmp_path, monkeypatch, capsys) -> Iterator[Here]:
    """Commands in this process. What they leave in it, a log and the job at work, is as before afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield Here(tmp_path, monkeypatch, capsys)
    begin(StartedJob())
    root.handlers[:] = handlers
    root.setLevel(level)
