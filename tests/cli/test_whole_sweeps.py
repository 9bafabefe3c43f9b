"""Sweeps of `-m`, as they are started from a shell."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "run.py"
PREPARE = ["-m", "data=documents", "tokenizer=bytes", "size=nano", "model=transformer", "task=prepare"]


def start(folder, *arguments):
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_all_jobs_are_checked_before_the_first_begins(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book " * 400)
    words = [word.replace("transformer", "landmark") for word in PREPARE]
    done = start(tmp_path, *words, "data.path=books", "retrieval.k=1,-1,2", "eval.length=512,1024")
    assert done.returncode == 2
    assert "error: 2 of 6 jobs cannot start, so none was: retrieval.k=-1 eval.length=512: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "outputs" / "data").exists()


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_sweep_goes_on_after_a_job_that_failed(tmp_path, launcher):
    if launcher != "basic":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"a book, the {name} " * 400)
    done = start(tmp_path, *PREPARE, "data.path=first,missing,empty,last", f"hydra/launcher={launcher}")
    assert done.returncode == 2, done.stderr
    assert len(list(tmp_path.glob("outputs/data/documents-*/manifest.json"))) == 2
    listed = done.stderr[done.stderr.index("2 jobs failed:") :].splitlines()
    assert [line.strip() for line in listed[1::2]] == ["data.path=missing", "data.path=empty"]
    assert all(line.startswith("error: ") for line in listed[2::2])
    assert "Traceback" not in done.stderr


def test_a_bug_in_one_job_is_told_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    from landmark.cli import main as app
    from landmark.cli.tasks import plan

    def breaks(command):
        if command.config.retrieval.k == 2:
            raise RuntimeError("a bug")
        print("planned", command.config.retrieval.k)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "run", breaks)
    monkeypatch.setattr(
        sys, "argv", ["run.py", "-m", "data=stdlib", "tokenizer=bytes", "size=nano", "task=plan", "retrieval.k=1,2,3"]
    )
    with pytest.raises(SystemExit) as stop:
        app.main()
    assert stop.value.code == 1
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line.startswith("planned")] == ["planned 1", "planned 3"]
    assert said.err.endswith("1 job failed:\n  retrieval.k=2\nerror: RuntimeError: a bug\n")
    assert "Traceback" in said.err
