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
from landmark.models import Decoder, DecoderConfig, save
from tests.configurations import compose_conf

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("experiments/*/README.md"))]


def commands() -> list:
    found = []
    for readme in READMES:
        for block in re.findall(r"```bash\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                elsewhere = any(word.startswith("hydra/launcher=") for word in words)
                if words[:2] == ["python", "run.py"] and (elsewhere or readme is not READMES[0]):
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
    targets = re.findall(r"^make (\w+)", text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"quickstart", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    folders = ("benchmarks", "docs", "experiments", "landmark")
    for page in [READMES[0], *(page for folder in folders for page in sorted(ROOT.glob(f"{folder}/**/*.md")))]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.relative_to(ROOT)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.relative_to(ROOT)} links to {target}#{anchor}"


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block, _, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    config = DecoderConfig("landmark", 320, 1, 2, 8, 32, landmark_id=257, block_size=50)
    save(Decoder(config), tmp_path)
    scope = {"tokens": torch.randint(0, 256, (1, 600))}
    exec(block.replace("outputs/runs/…", str(tmp_path)), scope)
    assert scope["out"].shape == (2, 8, 512, 64)
    assert scope["logits"].shape == (1, 100, 320)
    assert scope["memory"].stats["chunks"] == 3
    assert [len(generated) for generated in scope["texts"]] == [20, 20]
    again = landmark.load(tmp_path).new_memory()
    again.load(tmp_path / "book.memory")
    assert again.position == scope["book"].position == 612


def test_the_examples_with_transformers_run(tmp_path, capsys):
    pytest.importorskip("transformers")
    from landmark.huggingface import load
    from tests.huggingface.conftest import make_model, make_tokenizer

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, *blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks[0].splitlines()) == 10
    (tmp_path / "model").mkdir()
    make_model("qwen3").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    scope = {"document": "A heron stands in the water and waits. " * 30}
    for block in blocks:
        exec(block.replace("path/to", str(tmp_path)), scope)
    length = scope["ids"].shape[1]
    assert length > 1000
    assert scope["answer"].shape == (1, length + 20)
    assert capsys.readouterr().out.count("report ") == 3
    again, _ = load(tmp_path / "mine")
    assert torch.equal(again.generate(scope["ids"], max_new_tokens=20), scope["answer"])
