"""Commands of the experiments' READMEs compose, links lead somewhere, and the Python examples of README.md run.

The commands of README.md that need one machine are run in test_docs.py.
"""

import os
import re
from itertools import product
from pathlib import Path

import pytest

from landmark.experiment.config import rows, to_config
from landmark.experiment.config.checks import check
from tests.configurations import compose_conf
from tests.forked import python
from tests.saved import saved_run
from tests.test_docs import CLUSTER, bash_commands

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "docs" / "cluster.md", *sorted(ROOT.glob("experiments/*/README.md"))]


def commands() -> list:
    """Those that test_docs.py does not run: of experiments, and of clusters."""
    return [
        pytest.param(words, id=f"{readme.parent.name}: {' '.join(words)}")
        for readme in READMES
        for program, *words in bash_commands(readme)
        if program == "run.py" and (any(word.startswith(CLUSTER) for word in words) or readme not in READMES[:2])
    ]


@pytest.mark.parametrize("words", commands())
def test_commands_compose_with_all_their_rows(words):
    sweep = words[0] == "-m"
    choices = [
        [f"{key}={value}" for value in values.split(",")] if sweep else [f"{key}={values}"]
        for key, _, values in (word.partition("=") for word in words[sweep:] if not word.startswith("hydra"))
    ]
    for overrides in product(*choices):
        config = to_config(compose_conf(list(overrides)))
        selected = rows.select(config, list(overrides), compose_conf)
        assert selected
        for row in selected:
            for one in row.configs:
                check(one)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_make_targets_exist():
    folders = ("benchmarks", "docs", "experiments", "landmark")
    for page in [*ROOT.glob("*.md"), *(page for folder in folders for page in sorted(ROOT.glob(f"{folder}/**/*.md")))]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.relative_to(ROOT)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.relative_to(ROOT)} links to {target}#{anchor}"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text += (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"quickstart", "test", "docs"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


ANSWERED = "assert answer.shape[1] == ids.shape[1] + 20 > 1000"
EXAMPLES = {  # a page's examples in their order: what holds after each
    "README.md": ["assert session.ids == again.ids and len(session.ids) >= 1000 and session.stats['blocks_kept'] > 30"],
    "docs/python.md": [
        "assert out.shape == (2, 8, 512, 64) and logits.shape == (1, tokens.shape[1] % 250, 320)\n"
        "assert memory.stats['chunks'] == 7 and [type(text) for text in texts] == [str, str]\n"
        "again = landmark.load('outputs/runs/NAME')[0].new_memory()\n"
        "again.load('book.memory')\n"
        "assert again.position == book.position > tokens.shape[1]",
        ANSWERED,
        "import torch\n"
        "keys, queries = torch.rand(2, 3, 8, 4), torch.rand(2, 5, 4)\n"
        "scores = Scorer().score(queries, Scorer().summarise(keys, keys, 0), None)\n"
        "assert torch.allclose(scores, torch.einsum('ctd,cnsd->ctns', queries, keys).amax(-1))",
        f"{ANSWERED}\n"
        "from landmark.models.huggingface import load\n"
        "assert load('path/to/mine')[0].generate(ids, max_new_tokens=20).equal(answer)",
    ],
    "docs/ask_a_book.md": ["assert prefixes.longest(ids[0].tolist()) >= 1000"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the pages' examples open, where they say: a run, a model of transformers and a book."""
    pytest.importorskip("transformers")
    from tests.models.huggingface.conftest import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("examples")
    run, model = folder / "outputs" / "runs" / "NAME", folder / "path" / "to" / "model"
    model.mkdir(parents=True)
    saved_run(run, config=to_config(compose_conf(["model=landmark", "data=stdlib", "tokenizer=bytes", "size=nano"])))
    make_model("qwen3").save_pretrained(model)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    tokenizer.save_pretrained(model)
    (folder / "book.txt").write_text("A heron stands in the water and waits. " * 30)
    return folder


@pytest.mark.parametrize("page", EXAMPLES)
def test_every_example_runs_as_it_stands_in_a_process_of_its_own(folder, page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for block, holds in zip(blocks, EXAMPLES[page], strict=True):
        done = python("-c", block + holds, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
