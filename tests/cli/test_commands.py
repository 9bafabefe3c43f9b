"""run.py as it is started from a shell: what it prints, and how it ends where a stream is closed, full or unread."""

import json
import logging
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest

from landmark.cli import main, tasks
from landmark.cli.terminal import said
from tests.cli.shell import RUN, start
from tests.configurations import SMALL


def test_standard_output_is_the_answer_alone(here, monkeypatch):
    def answer(_):
        logging.getLogger("landmark.experiment.data").info("notes has 1 document(s)")
        print("A heron.")

    monkeypatch.setattr(main, "generate", answer)
    done = here("task=generate", "prompt=Who?", "model=pretrained", "model.name=x")
    assert (done.out, done.err) == ("A heron.\n", "notes has 1 document(s)\n")


def test_nothing_asked_for_shows_what_there_is(here):
    done = here()
    assert (done.code, done.err) == (0, "")
    assert "  +experiment=table1_pg19               Table 1, PG-19: perplexity by evaluation length" in done.out
    assert "  task=plan       print what is missing and what it costs; make nothing\n" in done.out
    assert "python run.py +experiment=quickstart " in done.out
    status = here("task=status")
    assert (status.code, status.err) == (0, "")
    assert status.out.startswith("not begun: ablation_retrieval, ")
    assert list(here.folder.iterdir()) == []
    (here.folder / "mine" / "experiment").mkdir(parents=True)
    (here.folder / "mine" / "experiment" / "pair.yaml").write_text(
        "# @package _global_\n# Two rows. Of mine.\nname: pair\n"
    )
    assert re.search(r"\+experiment=pair +Two rows\n", here("--config-dir", "mine").out)
    helped = here("--help", "train.steps=7").out
    assert helped.startswith(done.out)
    assert "  steps: 7\n" in helped


def test_a_missing_extra_is_named():
    error = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    assert said(error) == "this needs the package transformers: pip install 'landmark[hf]'"
    assert said(ModuleNotFoundError("No module named 'nowhere'", name="nowhere")) is None  # a bug


COMMAND = f"{shlex.quote(sys.executable)} {shlex.quote(str(RUN))}"
PLAN = f"{COMMAND} +experiment=quickstart task=plan"
STREAMS = {  # a line of the shell, its exit code, and its last words
    "nobody reads": (f"{COMMAND} --help | head -1; echo ${{PIPESTATUS[0]}}", 0, "141"),
    "closed messages": (f"{COMMAND} task=nope 2>&-", 2, ""),
    "full output": (f"{PLAN} >/dev/full", 2, "No space left on device: make room"),
    "closed input": (f"{PLAN} <&-", 0, "missing"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_no_stream_ends_in_a_traceback(tmp_path, case):
    line, code, last = STREAMS[case]
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert last in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# ---- sweeps of `-m`


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


FREE = ["-m", "data=documents", "data.path=books", "tokenizer=bytes", "size=nano", *SMALL, "eval.tokens=4096"]


def test_a_sweep_without_an_experiment_ends_in_a_table(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book of blocks, read in order " * 3000)
    grid = ("retrieval.k=10,2", "eval.local=250,150")
    words = [*FREE, "model=landmark", *grid, "eval.length=1024", "name=mine"]
    done = start(tmp_path, *words, f"hydra/launcher={'joblib' if find_spec('hydra_plugins') else 'basic'}")
    assert done.code == 0, done.err
    assert "#1 k10_local150: perplexity " in done.out
    assert len(list(tmp_path.glob("outputs/multirun/*/*/[0-3]/.hydra/overrides.yaml"))) == 4
    table = done.out[done.out.index("\nmine: size nano, data documents") :].splitlines()
    names = [f"k{k}_local{local}" for k in (10, 2) for local in (250, 150)]
    assert table[2] == "all rows: model landmark, length 1024"
    assert [line.split()[0] for line in table[6:10]] == names
    records = [json.loads(path.read_text()) for path in (tmp_path / "outputs" / "records" / "rows").iterdir()]
    assert {record["labels"]["row"] for record in records} == set(names)  # by which W&B knows them


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_sweep_goes_on_after_a_job_that_failed(tmp_path, launcher):
    if launcher != "basic":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
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

    monkeypatch.setitem(tasks.TASKS, "plan", breaks)
    done = here("-m", "data=stdlib", "tokenizer=bytes", "size=nano", "task=plan", "model=landmark", "retrieval.k=1,2,3")
    assert done.code == 1
    assert [line for line in done.out.splitlines() if line.startswith("planned")] == ["planned 1", "planned 3"]
    assert done.err.endswith("1 job failed:\n  retrieval.k=2\nerror: RuntimeError: a bug\n")
    assert "Traceback" in done.err
