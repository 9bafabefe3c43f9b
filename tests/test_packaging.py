"""The wheel: built, installed where the source tree is out of sight, and used as a command."""

import heapq
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import landmark
from tests.configurations import SMALL
from tests.test_docs import write_files

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder of programs. It sees the dependencies of this one, and no source tree."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path.endswith("site-packages")]  # an editable install is a .pth file in there
    (packages / "dependencies.pth").write_text("\n".join(seen))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True, capture_output=True)
    return folder / "bin"


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def run_together(installed: Path, folder: Path, *commands: list[str]) -> list[dict[str, Any]]:
    """What the installed program says to several commands, in one process: most of one's time is imports."""
    program = str(installed / "landmark")
    (folder / "commands.json").write_text(json.dumps([[program, *words] for words in commands]))
    driver = ["env", f"PYTHONPATH={folder}", str(installed / "python"), str(ROOT / "tests" / "run_commands.py")]
    done = run([*driver, "commands.json", "results.json"], folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def test_the_wheel_has_every_file_once_and_its_metadata_are_whole_and_of_one_version(wheel):
    packed = zipfile.ZipFile(wheel).namelist()
    assert len(set(packed)) == len(packed)
    tracked = [path for path in (ROOT / "landmark").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(ROOT)) for path in tracked} <= set(packed)
    assert {f"landmark/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")} <= set(packed)
    papers = list(ROOT.glob("experiments/*/paper.csv"))
    assert papers
    assert {f"landmark/{path.relative_to(ROOT)}" for path in papers} <= set(packed)
    assert "landmark/py.typed" in packed
    assert {name.partition("/")[0] for name in packed if ".dist-info/" not in name} == {"landmark"}
    assert not [name for name in packed if name.endswith(".png")]
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {landmark.__version__}\n" in cited
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"description", "readme", "license", "authors", "keywords", "classifiers", "urls"} <= project.keys()
    assert project["scripts"] == {"landmark": "landmark.cli.main:main"}


def test_the_quickstart_works_in_any_folder_and_its_run_reads_a_text(installed, tmp_path):
    where = run([str(installed / "python"), "-c", "import landmark; print(landmark.__file__)"], tmp_path)
    assert where.stdout.startswith(str(installed.parent))
    assert run([str(installed / "python"), "-m", "landmark", "--version"], tmp_path).stdout.startswith("landmark ")
    words = ["+experiment=quickstart", *SMALL, "data.max_documents=6", "eval.tokens=8192", "eval.prompts=1"]
    done = run([str(installed / "landmark"), *words], tmp_path)
    assert done.returncode == 0, done.stderr
    (picture,) = re.findall(r"^picture: file://(\S+)$", done.stdout, re.MULTILINE)
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    (folder,) = tmp_path.glob("outputs/runs/landmark-*")
    tasks = {"task=generate prompt=def": "", f"task=inspect prompt_file={heapq.__file__}": "inspect/heapq-landmark-"}
    commands = [[*task.split(), f"run={folder.name}", "logger=csv"] for task in tasks]
    planned, *tried = run_together(installed, tmp_path, [*words, "train.steps=3", "task=plan"], *commands)
    assert re.search(r"^on a cluster: landmark -m .*\+experiment=quickstart", planned["said"], re.M), planned
    for each, said in zip(tried, tasks.values(), strict=True):
        assert each["code"] == 0, each
        assert said in each["said"]


def test_what_the_pages_add_works_beside_the_installed_package(installed, tmp_path):
    """The files and commands of docs/add_a_*.md, in a folder that has nothing else of this program."""
    (tmp_path / "notes").mkdir()
    for number in range(12):
        (tmp_path / "notes" / f"{number}.md").write_text(f"Note {number} on blocks and memory.\n" * 600)
    for page in ROOT.glob("docs/add_a_*.md"):
        write_files(page, tmp_path)
    tiny = [*SMALL, *("data=notes", "data.path=notes", "tokenizer=bytes", "size=nano")]
    tiny += ["eval.tokens=4096", "eval.length=512"]
    own = ["--config-dir", "mine/conf"]
    made, said, planned = run_together(
        installed,
        tmp_path,
        [*own, "model=gated", *tiny],
        [*own, "model=gated", "task=generate", "run=latest", "prompt=Note", "generate.tokens=2", "trainer=cpu"],
        [*own, "+experiment=block_sizes", *tiny[:-1], "task=plan"],
    )
    assert "[1/1] single: perplexity " in made["said"], made
    assert list(tmp_path.glob("outputs/runs/mine.gated-landmark-mine.notes-nano-*/model.safetensors"))
    assert "2 generated" in said["messages"], said
    assert "row block25_2048" in planned["said"], planned
