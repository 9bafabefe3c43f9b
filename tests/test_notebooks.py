"""Every notebook runs, in a kernel of this environment, and was committed with the output of a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from landmark.experiment.config import to_config
from landmark.utils.files import sealed, write_json
from tests.configurations import compose_conf, row_record
from tests.saved import saved_run

ROOT = Path(__file__).parents[1]


def read(path: Path) -> NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def run(monkeypatch):
    """Executes a notebook anew, where it lies. Returns it with its outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def execute(name: str) -> NotebookNode:
        notebook = read(ROOT / "notebooks" / f"{name}.ipynb")
        for cell in code_of(notebook):
            cell.outputs, cell.execution_count = [], None
        place = {"metadata": {"path": str(ROOT / "notebooks")}}
        # On a busy machine the text that a cell prints comes in several parts.
        client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place, coalesce_streams=True)
        client.execute()
        return notebook

    return execute


def shape(cell: NotebookNode) -> list[tuple]:
    return [(each.output_type, each.get("name"), sorted(each.get("data", {}))) for each in cell.outputs]


def said(notebook: NotebookNode) -> str:
    return "".join(each.text for cell in code_of(notebook) for each in cell.outputs if each.output_type == "stream")


def same_shape(made: NotebookNode, name: str) -> bool:
    committed = read(ROOT / "notebooks" / f"{name}.ipynb")
    return [shape(cell) for cell in code_of(made)] == [shape(cell) for cell in code_of(committed)]


def test_the_mechanism_by_hand_and_by_the_library(run):
    made = run("01_mechanism")
    assert same_shape(made, "01_mechanism")
    assert said(made) == said(read(ROOT / "notebooks" / "01_mechanism.ipynb"))


def test_tables_are_made_of_records(run, monkeypatch, tmp_path):
    rows = {"plain_512": ("transformer", 512, 8.0), "landmark_512": ("landmark", 512, 6.5)}
    for name, (model, length, perplexity) in rows.items():
        config = to_config(compose_conf(["data=stdlib", "tokenizer=bytes", f"model={model}", f"eval.length={length}"]))
        record = row_record(config, name, perplexity)
        record["labels"] |= {"experiment": "quickstart"}
        write_json(tmp_path / "records" / "rows" / f"{record['id']}.json", sealed(record))
    monkeypatch.setenv("LANDMARK_OUTPUT", str(tmp_path))
    made = run("02_tables")
    assert same_shape(made, "02_tables")
    assert "   2 quickstart\n2 rows read the same text" in said(made)
    data = [each.get("data", {}) for cell in code_of(made) for each in cell.outputs]
    (table,) = (each["text/markdown"] for each in data if "text/markdown" in each)
    assert "| plain_512 | 512 | 8.00 ± 0.0" in table
    assert "| landmark_512 | 512 | 6.50 ± 0.0" in table


def test_what_is_retrieved_on_a_book(run, monkeypatch, tmp_path):
    config = to_config(compose_conf(["model=landmark", "data=stdlib", "tokenizer=bytes"]))
    saved_run(tmp_path / "runs" / "landmark-made-up", config=config, block_size=50)
    (tmp_path / "runs" / "landmark-not-finished").mkdir()
    monkeypatch.setenv("LANDMARK_OUTPUT", str(tmp_path))
    monkeypatch.delenv("LANDMARK_RUN", raising=False)
    monkeypatch.delenv("LANDMARK_BOOK", raising=False)
    made = run("03_retrieval")
    assert same_shape(made, "03_retrieval")
    assert "8,192 tokens in 163 blocks of 50; 2 layers of 2 heads" in said(made)
