"""The files and commands of README.md and of the pages below docs/, in a copy of the program with a model that is too
small to learn anything; the API page against the API."""

import importlib
import inspect
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from landmark.experiment.config import to_config
from landmark.experiment.config.rows import named
from tests.configurations import CONF, compose_conf

pytestmark = pytest.mark.timeout(900)  # all commands together

ROOT = Path(__file__).parents[1]
README, API = ROOT / "README.md", ROOT / "docs" / "api.md"
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page != API]
SMALL = [
    *("size=nano", "tokenizer=bytes", "trainer=cpu", "logger=csv", "train.precision=32-true"),
    *("model.num_layers=1", "model.num_heads=2", "model.head_dim=4", "model.mlp_dim=8"),
    *("train.steps=2", "train.batch_size=1", "train.validate_every=2", "train.validate_batches=1"),
    *("eval.tokens=8192", "eval.prompts=1", "eval.generated=1", "data.max_documents=6"),
]
ELSEWHERE = {  # replaced in a test
    "tokenizer=gpt2_1024": "tokenizer=bytes",
    "data.path=DIR": "data.path=books",
    "trainer=ddp": "trainer=cpu",
    "model.name=$MODEL": "model.name=path/to/model",
    "model.name=DIR": "model.name=path/to/model",
    "data.path=BOOKS": "data.path=books",
}
CLUSTER = ("hydra/launcher=", "hydra/sweeper=")  # by plugins


def bash_commands(page: Path) -> list[list[str]]:
    """Words of every `python …` or `landmark …` in a page's bash blocks, as if after `python`."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    starts = {"python": [], "landmark": ["run.py"]}
    served = ["python", "-m", "landmark.reading.serving"]  # until Ctrl-C; tests/reading/serving has it
    return [[*starts[words[0]], *words[1:]] for words in found if words and words[0] in starts and words[:3] != served]


def write_files(page: Path, folder: Path) -> None:
    """The files that a page shows, in a folder that has none of them."""
    text = page.read_text(encoding="utf-8")
    for name, content in re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL | re.MULTILINE):
        assert not (folder / name).exists(), f"{page.name} writes over {name}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def small(words: list[str]) -> list[str]:
    """The command with little to do: few rows, and small values for settings that neither it nor a row sets."""
    program, *given = [ELSEWHERE.get(word, word) for word in words]
    values = dict(word.lstrip("+").partition("=")[::2] for word in given)
    if values == {"task": "status"}:  # of all launches
        return [program, *given]
    if values.get("model") == "pretrained":
        less = ["teach.steps=2", "teach.length=256"] if values.get("task") == "teach" else ["generate.tokens=2"]
        return [program, *given, "trainer=cpu", *(word for word in less if word.partition("=")[0] not in values)]
    rows, few = {}, []
    if (CONF / "experiment" / f"{values.get('experiment')}.yaml").exists():
        config = to_config(compose_conf([f"+experiment={values['experiment']}"]))
        rows = named(config)
        compared = {name for pair in config.compare.values() for name in pair}
        few = [f"~rows.{name}" for name in config.rows if compared and name not in compared]
    less = [word for word in SMALL if (key := word.partition("=")[0]) not in values and f"{key}=" not in str(rows)]
    from_hub = values.get("experiment") == "table1_pg19" and "data.path" not in values
    return [program, *given, *less, *few, *(["data.path=books"] if from_hub else [])]


OF_PAGES = [
    (page, words)
    for page in [README, *PAGES]
    for words in bash_commands(page)
    if not any(word.startswith(CLUSTER) for word in words)
]
COMMANDS = [  # each once, where two pages have it
    (page, words)
    for number, (page, words) in enumerate(OF_PAGES)
    if words not in (others for _, others in OF_PAGES[:number])
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of all commands, in their order, in a copy of the program with the files of the pages."""
    copy = tmp_path_factory.mktemp("copy")
    for name, ignored in {"landmark": "__pycache__", "conf": "__pycache__", "experiments": "results"}.items():
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(ignored))
    shutil.copy(ROOT / "run.py", copy)
    generator = random.Random(0)
    for number, split in enumerate(("train", "validation", "test"), 1):
        (copy / "books" / split).mkdir(parents=True)
        text = " ".join(generator.choice(["landmark", "block", "memory"]) for _ in range(3000))
        (copy / "books" / split / f"{number}.txt").write_text(text)
    (copy / "book.txt").write_text(text[:2000])
    if importlib.util.find_spec("transformers"):
        from tests.models.huggingface.conftest import save_model

        save_model(copy / "path/to/model")
    (copy / "notes").mkdir()
    for number, page in enumerate(sorted(ROOT.glob("experiments/*/README.md"))):
        shutil.copy(page, copy / "notes" / f"{number}.md")
        (copy / "notes" / f"{number}.txt").write_text(9 * page.read_text(encoding="utf-8"))
    for page in PAGES:
        write_files(page, copy)
    (copy / "commands.json").write_text(json.dumps([small(words) for _, words in COMMANDS]))
    driver = [sys.executable, str(ROOT / "tests" / "run_commands.py"), "commands.json", "results.json"]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(driver, cwd=copy, capture_output=True, text=True, env=environment, input="")
    assert done.returncode == 0, done.stderr
    return {
        " ".join(words): result for (_, words), result in zip(COMMANDS, json.loads((copy / "results.json").read_text()))
    }


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{page.name}: {' '.join(words)}") for page, words in COMMANDS]
)
def test_a_command_does_what_it_says(results, words):
    result = results[" ".join(words)]
    assert result["code"] == 0, result["messages"]
    expected = {"task=plan": "missing: ", "task=prepare": " tokens, validation ", "task=generate": None}
    expected |= {"task=table": "written: ", "task=dashboard": "written: "}
    task = next((word for word in words if word.startswith("task=")), None)
    told = expected.get(task, "") if task else "rows evaluated now" if "row=" not in " ".join(words) else "perplexity"
    if task is None and not any(word.startswith("+experiment=") for word in words):
        told = "perplexity"
    if "--cfg" in words:
        told = "seed: 0"
    if told is not None:
        assert told in result["said"]


def test_the_added_model_is_another_one_and_the_added_table_compares_its_rows(results):
    (said,) = [result["said"] for command, result in results.items() if "model=landmark,gated" in command]
    first, second = re.findall(r"perplexity ([\d.]+)", said)
    assert first != second
    alone = next(result["said"] for command, result in results.items() if "model=gated" in command)
    assert f"perplexity {second}" in alone
    (drawn,) = [
        result["said"] for command, result in results.items() if command.endswith("task=table") and "block_s" in command
    ]
    assert "blocks of 25 against 50 at 2048: " in drawn
    assert drawn.count("block25_") >= 2


MODULES = ("attention", "memory", "models", "models.huggingface", "experiment.data", "experiment.training")
MODULES += ("experiment.evaluation.rows",)


@pytest.mark.parametrize("module", MODULES)
def test_api_page_has_every_public_name_as_it_is_called(module):
    if module == "models.huggingface":
        pytest.importorskip("transformers")
    loaded = importlib.import_module(f"landmark.{module}")
    section = re.search(rf"^## landmark\.{module}\n(.*?)(?=^## |\Z)", API.read_text(encoding="utf-8"), re.DOTALL | re.M)
    shared = {"Memory", "landmark_attention", "load"}
    for name in loaded.__all__:
        assert f"`{name}{call(getattr(loaded, name))}`" in section[1], name
    assert shared == set(importlib.import_module("landmark").__all__)


def test_names_with_their_module_are_as_the_api_page_calls_them():
    spans = re.findall(r"`landmark\.([a-z_.]+)\.(\w+)(\([^`]*)?`", API.read_text(encoding="utf-8"))
    for module, name, signature in spans:
        value = getattr(importlib.import_module(f"landmark.{module}"), name)
        assert not signature or signature == call(value), name


def call(value) -> str:
    """The signature without types; empty for a constant and for a protocol."""
    if not callable(value) or getattr(value, "_is_protocol", False):
        return ""
    signature = inspect.signature(value)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_the_examples_of_the_api_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", API.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict = {}
    for block in blocks:
        exec(block, scope)
    assert len(blocks) == 5
    assert scope["out"].shape == (1, 8, 30, 64)
    assert [piece.shape[1] for piece in scope["logits"]] == [250, 250, 100]
