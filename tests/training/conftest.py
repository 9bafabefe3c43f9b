"""Trainings that several tests look at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.training_case import make_config, run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, dict[str, Any]]]:
    """Folder, model and summary of a training of a kind that nothing disturbed."""
    made: dict[str, Any] = {}

    def train(kind: str) -> tuple[Path, Any, dict[str, Any]]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, *run(make_config(kind), folder)
        return made[kind]

    return train
