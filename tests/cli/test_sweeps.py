"""Sweeps of `-m`, as they are started from a shell."""

import json

import pytest

from landmark.cli.main import TASKS
from tests.cli.shell import start

PREPARE = ["-m", "data=documents", "tokenizer=bytes", "size=nano", "model=transformer", "task=prepare"]


def test_all_jobs_are_checked_before_the_first_begins(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book " * 400)
    words = [word.replace("transformer", "landmark") for word in PREPARE]
    done = start(tmp_path, *words, "data.path=books", "retrieval.k=1,-1,2", "eval.length=512,1024")
    assert done.code == 2
    assert "error: 2 of 6 jobs cannot start, so none was: retrieval.k=-1 eval.length=512: " in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "outputs" / "data").exists()
    both = start(tmp_path, *PREPARE[:-2], "model=transformer,landmark", "data.path=books", "model.block_size=25")
    assert "error: 1 of 2 jobs cannot start, so none was: model=transformer: model.block_size has no" in both.err


FREE = [
    *("-m", "data=documents", "data.path=books", "tokenizer=bytes", "size=nano", "logger=csv", "trainer=cpu"),
    *("model.num_layers=1", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32", "trainer.threads=1"),
    *("train.steps=2", "train.batch_size=2", "train.validate_batches=1", "eval.tokens=4096"),
]


def test_a_sweep_without_an_experiment_ends_in_a_table(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book of blocks, read in order " * 3000)
    grid = ("retrieval.k=10,2", "eval.local=250,150")
    done = start(tmp_path, *FREE, "model=landmark", *grid, "eval.length=1024", "name=mine")
    assert done.code == 0, done.err
    assert "#1 k10_local150: perplexity " in done.out
    table = done.out[done.out.index("\nmine: size nano, data documents") :].splitlines()
    names = [f"k{k}_local{local}" for k in (10, 2) for local in (250, 150)]
    assert table[2] == "all rows: model landmark, length 1024"
    assert [line.split()[0] for line in table[6:10]] == names
    records = [json.loads(path.read_text()) for path in (tmp_path / "outputs" / "records" / "rows").iterdir()]
    assert {record["labels"]["row"] for record in records} == set(names)  # by which W&B knows them


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_sweep_goes_on_after_a_job_that_failed(tmp_path, launcher):
    if launcher != "basic":
        pytest.importorskip("joblib")
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"a book, the {name} " * 400)
    done = start(tmp_path, *PREPARE, "data.path=first,missing,empty,last", f"hydra/launcher={launcher}")
    assert done.code == 2, done.err
    assert len(list(tmp_path.glob("outputs/data/documents-*/manifest.json"))) == 2
    listed = done.err[done.err.index("2 jobs failed:") :].splitlines()
    assert [line.strip() for line in listed[1::2]] == ["data.path=missing", "data.path=empty"]
    assert all(line.startswith("error: ") for line in listed[2::2])
    assert "Traceback" not in done.err


def test_a_bug_in_one_job_is_told_and_the_others_go_on(here, monkeypatch):
    def breaks(command):
        if command.config.retrieval.k == 2:
            raise RuntimeError("a bug")
        print("planned", command.config.retrieval.k)

    monkeypatch.setitem(TASKS, "plan", breaks)
    done = here("-m", "data=stdlib", "tokenizer=bytes", "size=nano", "task=plan", "model=landmark", "retrieval.k=1,2,3")
    assert done.code == 1
    assert [line for line in done.out.splitlines() if line.startswith("planned")] == ["planned 1", "planned 3"]
    assert done.err.endswith("1 job failed:\n  retrieval.k=2\nerror: RuntimeError: a bug\n")
    assert "Traceback" in done.err
