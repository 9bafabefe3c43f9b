"""Commands of the experiments' READMEs compose, links lead somewhere, and the Python examples of README.md run.

The commands of README.md that need one machine are run in test_docs.py.
"""

import re
import shlex
from itertools import product
from pathlib import Path

import pytest
import torch

import landmark
from landmark.config import rows, to_config
from landmark.config.checks import check
from landmark.data import load_tokenizer
from landmark.models import Decoder, save
from landmark.utils.files import write_json
from tests.configurations import compose_conf, decoder_config

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "docs" / "cluster.md", *sorted(ROOT.glob("experiments/*/README.md"))]


def commands() -> list:
    found = []
    for readme in READMES:
        for block in re.findall(r"```bash\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                elsewhere = any(word.startswith("hydra/launcher=") for word in words)
                if words[:2] == ["python", "run.py"] and (elsewhere or readme not in READMES[:2]):
                    found.append(pytest.param(words[2:], id=f"{readme.parent.name}: {' '.join(words[2:])}"))
    return found


@pytest.mark.parametrize("words", commands())
def test_commands_compose_with_all_their_rows(words):
    sweep = words[0] == "-m"
    choices = [
        [f"{key}={value}" for value in values.split(",")] if sweep else [f"{key}={values}"]
        for key, _, values in (word.partition("=") for word in words[sweep:])
    ]
    for overrides in product(*choices):
        config = to_config(compose_conf(list(overrides)))
        selected = rows.select(config, list(overrides), compose_conf)
        assert selected
        for row in selected:
            for one in row.configs:
                check(one)


def test_make_targets_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text += (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"quickstart", "test", "docs"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    folders = ("benchmarks", "docs", "experiments", "landmark")
    for page in [*ROOT.glob("*.md"), *(page for folder in folders for page in sorted(ROOT.glob(f"{folder}/**/*.md")))]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.relative_to(ROOT)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.relative_to(ROOT)} links to {target}#{anchor}"


def python_blocks(page: Path, folder: Path) -> list[str]:
    """The Python examples of a page; the run and the models that they open lie in `folder`."""
    text = page.read_text(encoding="utf-8").replace("outputs/runs/…", str(folder / "run"))
    return re.findall(r"```python\n(.*?)```", text.replace("path/to", str(folder)), re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run, a model of transformers and a document."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer("bytes")
    save(Decoder(decoder_config("landmark", 320, 1, 2, 8, 32, landmark_id=257, block_size=50)), tmp_path / "run")
    write_json(tmp_path / "run" / "run.json", {"tokenizer": tokenizer.hash})
    return tmp_path


def test_the_text_example_of_the_readme_runs(folder, capsys):
    scope: dict = {}
    exec(python_blocks(READMES[0], folder)[0], scope)
    assert len(scope["answer"]) == 40
    assert capsys.readouterr().out.strip("\n") == scope["tokenizer"].decode(scope["answer"]).strip("\n")


def test_the_python_example_runs(folder):
    scope: dict = {}
    exec(python_blocks(ROOT / "docs" / "python.md", folder)[0], scope)
    assert scope["out"].shape == (2, 8, 512, 64)
    assert scope["logits"].shape == (1, scope["tokens"].shape[1] % 250, 320)
    assert scope["memory"].stats["chunks"] == 7
    assert [type(text) for text in scope["texts"]] == [str, str]
    again = landmark.load(folder / "run")[0].new_memory()
    again.load(folder / "book.memory")
    assert again.position == scope["book"].position > scope["tokens"].shape[1]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_examples_with_transformers_run(folder, capsys, page):
    pytest.importorskip("transformers")
    from landmark.huggingface import load
    from tests.huggingface.conftest import make_model, make_tokenizer

    _, *blocks = python_blocks(ROOT / page, folder)
    assert any(len(block.splitlines()) >= 9 for block in blocks)
    (folder / "model").mkdir()
    make_model("qwen3").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    text = "A heron stands in the water and waits. " * 30
    (folder / "document.txt").write_text(text)
    scope = {"document": text} if page == "README.md" else {}
    for block in blocks:
        exec(block, scope)
    length = scope["ids"].shape[1]
    assert length > 1000
    assert scope["answer"].shape == (1, length + 20)
    assert capsys.readouterr().out.count("report ") == 3 * (page != "README.md")
    again, _ = load(folder / "mine")
    assert torch.equal(again.generate(scope["ids"], max_new_tokens=20), scope["answer"])
