"""`hydra/sweeper=optuna`, as it is started from a shell."""

import sys

import pytest

from landmark.cli import main as app
from landmark.cli.tasks.evaluate import objective
from tests.cli.test_whole_sweeps import FREE, start

OPTUNA = ["model=landmark", "eval.length=1024", "hydra/sweeper=optuna"]
SPACE = ["retrieval.k=choice(1,2,4)", "eval.local=int(interval(150,250))"]


@pytest.fixture
def books(tmp_path):
    pytest.importorskip("optuna", reason="the optional extra `optuna` is not installed")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book of blocks, read in order " * 3000)
    return tmp_path


def test_optuna_looks_for_the_best_setting_and_goes_on(books):
    done = start(books, *FREE, *OPTUNA, *SPACE, "hydra.sweeper.n_trials=2")
    assert done.returncode == 0, done.stderr
    first = [line for line in done.stdout.splitlines() if line.startswith("#")]
    more = start(books, *FREE, *OPTUNA, *SPACE, "hydra.sweeper.n_trials=3")
    assert more.returncode == 0, more.stderr
    found = {}
    for line in (line for line in more.stdout.splitlines() if line.startswith("#")):
        name, result = line.split(" ", 1)[1].split(": perplexity ")
        found[name] = float(result.split()[0])
    lines = [line for line in more.stdout.splitlines() if line.startswith("#")]
    assert [line.split(",")[0] for line in lines[:2]] == [line.split(",")[0] for line in first]
    assert ["from its record" in line for line in lines] == [True, True, False]
    (best,) = [line for line in more.stdout.splitlines() if line.startswith("best of 3 settings: retrieval.k=")]
    assert float(best.rpartition(" ")[2]) == pytest.approx(min(found.values()), abs=0.01)
    table = more.stdout[more.stdout.index("\nsweep: size nano, data documents") :].splitlines()
    assert [line.split()[0] for line in table[6:9]] == list(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "hydra/sweeper=optuna: nothing is swept"),
        (
            ["retrieval.k=1,2", "hydra.sweeper.n_trials=0"],
            "hydra.sweeper.n_trials=0: must be a whole number, at least 1",
        ),
        (["retrieval.k=choice(-1,-2)"], "the number of retrieved blocks cannot be negative"),
        (["train.lr=tag(log,interval(0,1))"], "train.lr=tag(log,interval(0,1)): "),
        (["retrieval.k=1,2", "task=plan"], "a job must evaluate one row"),
        (["retrieval.k=1,2", "+hydra.sweeper.storage=x"], "hydra.sweeper.storage=x: is not among the settings"),
        (["retrieval.k=1,2", "hydra.sweeper._target_=os.system"], "hydra.sweeper._target_=os.system: "),
    ],
)
def test_what_cannot_be_swept_is_one_line(books, monkeypatch, capsys, words, message):
    monkeypatch.chdir(books)
    monkeypatch.setattr(sys, "argv", ["run.py", *FREE, *OPTUNA, *words])
    with pytest.raises(SystemExit) as stop:
        app.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_job_that_fails_is_named_and_the_others_go_on(books):
    words = ["model=landmark", "data.path=choice(books,missing)", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=9"]
    done = start(books, *(word for word in FREE if not word.startswith("data.path=")), *words, "eval.length=1024")
    assert done.returncode == 2
    assert "best of 1 settings: data.path=books, with " in done.stdout
    assert "1 job failed:\n  data.path=missing\nerror: " in done.stderr
    assert "Traceback" not in done.stderr


def test_without_optuna_its_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("landmark.cli.launchers.importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["run.py", *FREE, *OPTUNA, *SPACE])
    with pytest.raises(SystemExit):
        app.main()
    assert capsys.readouterr().err == (
        "error: hydra/sweeper=optuna: is not installed, pip install '.[optuna]' installs it\n"
    )


@pytest.mark.parametrize(
    ("results", "number"),
    [
        ({"perplexity": 3.0, "nll": 1.0}, 3.0),
        ({"accuracy": 0.75, "correct": [1, 0.5]}, 0.25),
        ({"recall_at_1": 0.2, "recall_at_10": 0.5}, 0.5),
        ({"second_copy": 2.0, "perplexity": 9.0}, 2.0),
    ],
)
def test_a_row_returns_a_number_that_is_smaller_where_it_is_better(results, number):
    assert objective([{"results": results}] * 2) == number
