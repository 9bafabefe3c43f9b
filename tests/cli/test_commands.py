"""run.py as it is started from a shell: bad input is one line on stderr, the exit code is not 0, nothing is left."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import landmark

RUN = Path(__file__).parents[2] / "run.py"


KEPT = ("settings.py", "multirun.yaml")


def start(folder, *arguments, **variables):
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | variables)


BAD = {
    "misspelt key": (["model.blok_size=3"], "did you mean model.block_size?"),
    "misspelt key with a plus": (["+eval.tokns=3"], "unknown key eval.tokns"),
    "wrong type": (["train.steps=many"], "could not be converted to Integer"),
    "no such group member": (["size=huge"], "Available options in 'size': nano, paper, small"),
    "a setting as a flag": (["--experiment=x"], "--experiment=x: settings have no dashes, write +experiment=x"),
    "near a setting": (["train.step=200"], "error: train.step: there is no such setting; did you mean train.steps?"),
    "near an experiment": (
        ["+experiment=tabel1_pg19"],
        "experiment=tabel1_pg19: there is none; did you mean table1_pg19",
    ),
    "two experiments": (["-m", "+experiment=quickstart,table1_pg19"], "one experiment at a time"),
    "glob without a match": (["-m", "+experiment=quickstart", "model=glob(lstm*)"], "matches nothing"),
    "row and command line": (["+experiment=quickstart", "model=landmark"], "but row twice_last_blocks sets model="),
    "out of range": (["retrieval.k=-1"], "retrieval.k=-1: the number of retrieved blocks cannot be negative"),
    "no prompt": (["task=generate"], "task=generate: set prompt="),
    "prompt of another task": (["prompt=hello"], "prompt=hello: is for task=generate or inspect"),
    "generate from no run": (
        ["task=generate", "run=nowhere", "tokenizer=bytes", "prompt=hello"],
        "run=nowhere: no such run, outputs/runs has no run",
    ),
    "code in a configuration": (
        ["hydra.callbacks.table._target_=os.system"],
        "hydra.callbacks.table._target_=os.system",
    ),
    "report of nothing": (["task=report"], "outputs: there are no records to report"),
    "output below a file": (
        ["output=settings.py/x", "task=status"],
        "settings.py/x: Not a directory: no folder",
    ),
    "output is a file": (["output=settings.py", "task=prepare"], "settings.py: File exists: no folder can be made"),
    "output in no file system": (["output=/proc/x", "task=status"], "/proc/x: No such file or directory: no folder"),
    "cache below a file": (
        ["data.cache=settings.py/x", "data=stdlib", "tokenizer=bytes", "task=prepare"],
        "settings.py/x: Not a directory: no folder can be made there",
    ),
    "signs of the grammar": (
        ["task=generate", "prompt=Where? (there)"],
        "prompt: Hydra's grammar cannot read the value Where? (there); if it is a text, quote it twice: "
        "'prompt=\"Where? (there)\"'",
    ),
    "missing corpus": (["tokenizer=bytes", "data.path=nowhere", "task=prepare"], "nowhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(tmp_path, case):
    arguments, said = BAD[case]
    (tmp_path / "settings.py").touch()
    done = start(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in KEPT] == []


def test_the_version_is_ours(tmp_path):
    assert start(tmp_path, "--version").stdout == f"landmark {landmark.__version__}\n"


def test_the_tab_key_completes(tmp_path, monkeypatch):
    for line, found in {
        "+experiment=table1": "table1_arxiv +experiment=table1_pg19",
        "retrieval.rer": "rerank=",
    }.items():
        monkeypatch.setenv("COMP_LINE", f"landmark {line}")
        monkeypatch.setenv("COMP_POINT", str(len(f"landmark {line}")))
        assert found in start(tmp_path, "-sc", "query=bash").stdout


def test_nothing_asked_for_shows_what_there_is(tmp_path):
    """No training of the paper's size begins."""
    done = start(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  +experiment=table1_pg19               Table 1, PG-19: perplexity by evaluation length" in done.stdout
    assert "  task=plan       print what is missing and what it costs; make nothing\n" in done.stdout
    assert "python run.py +experiment=quickstart " in done.stdout
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "pair.yaml").write_text(
        "# @package _global_\n# Two rows. Of mine.\nname: pair\n"
    )
    assert re.search(r"\+experiment=pair +Two rows\n", start(tmp_path, "--config-dir", "mine").stdout)
    helped = start(tmp_path, "--help").stdout
    assert helped.startswith(done.stdout)
    assert "model: landmark, llama, llama_landmark" in helped
    assert "  max_hours: 24.0\n" in helped


def test_plan_of_the_quickstart(tmp_path):
    done = start(tmp_path, "+experiment=quickstart", "task=plan")
    assert (done.returncode, done.stderr) == (0, "")
    assert "missing: 2 runs, 6 rows" in done.stdout


def test_status_of_all_experiments(tmp_path):
    done = start(tmp_path, "task=status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("not begun: ablation_retrieval, ")
    assert list(tmp_path.rglob("*.*")) == []


def test_sweep_over_rows_works_on_each(tmp_path):
    done = start(tmp_path, "-m", "+experiment=quickstart", "task=plan", "row=plain_512,landmark_2048")
    assert done.returncode == 0
    assert done.stdout.count("missing: 1 runs, 1 rows") == 2


def test_free_sweep_works_on_each(tmp_path):
    common = ["data=stdlib", "tokenizer=bytes", "size=nano", "task=plan", "model=landmark"]
    done = start(tmp_path, "-m", *common, "retrieval.k=1,2")
    assert done.returncode == 0
    assert done.stdout.count("missing: 1 runs, 1 rows") == 2
