"""Commands as they are typed: in this process, where one costs a tenth of a second, or in one of their own."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import hydra
import pytest
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from landmark.cli import main as app
from landmark.experiment.config import rows
from landmark.experiment.config.rows import Composer
from tests.forked import python

RUN = Path(__file__).parents[2] / "run.py"


class Ended(NamedTuple):
    """code: the exit code. out, err: what was printed."""

    code: int
    out: str
    err: str


def start(folder: Path, *words: str, **variables: str) -> Ended:
    """Carry out a command in a process of its own, in a folder. variables: of the environment."""
    done = python(str(RUN), *words, cwd=folder, env=os.environ | variables)
    return Ended(done.returncode, done.stdout, done.stderr)


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """What Hydra composes, which is asked once for each choice of groups."""
    return _composer(overrides)


_composer = Composer(lambda words: hydra.compose("config", overrides=words))


def _mode(overrides: list[str]) -> RunMode | None:
    return RunMode.MULTIRUN if "hydra.mode=MULTIRUN" in overrides else None


class Here:
    """Carries out commands in this process, in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        monkeypatch.chdir(folder)

    def __call__(self, *words: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["run.py", *words])
        has_settings = any(word.startswith(("--config", "-c")) for word in words)
        self._monkeypatch.setattr(rows, "compose", hydra.compose if has_settings else compose)
        # Whether a command is a sweep, Hydra asks by composing the whole once more.
        self._monkeypatch.setattr(Hydra, "get_mode", lambda _, config_name, overrides: _mode(overrides))
        HydraConfig.instance().cfg = None
        code: object = 0
        try:
            app.main()
        except SystemExit as stop:
            code = stop.code
        assert isinstance(code, int)
        return Ended(code, *self._capsys.readouterr())
