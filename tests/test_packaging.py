"""What a wheel contains besides Python."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]


def test_every_data_file_is_declared():
    found = {file for file in (ROOT / "landmark").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    data = {file for file in found if file.suffix not in (".py", ".md")}
    folders = {ROOT / package.replace(".", "/"): patterns for package, patterns in DECLARED.items()}
    packed = {file for folder, patterns in folders.items() for pattern in patterns for file in folder.glob(pattern)}
    assert ROOT / "landmark/data/code.tiktoken" in packed
    assert data <= packed
