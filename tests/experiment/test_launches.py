"""task=status, and the launches that it and the report find in records: what is done, running, stopped or missing."""

import re
import shlex

import pytest

from landmark.experiment.launches import rows_without_launch
from tests.forked import hold

QUICK = ("+experiment=quickstart", "data=pg19")
FIRST = "quickstart (nano, pg19, bytes, eval.tokens=8192): "


def state(said, what):
    """State and note of a run or a row."""
    return re.search(rf"^  {what}\S*  +(\w+) *(.*)$", said, re.MULTILINE).groups()


def status(work, capsys, *words):
    capsys.readouterr()
    if words:
        work(*words, "task=status")
    else:
        work.task("task=status", f"output={work.output}")
    return capsys.readouterr().out


def test_a_row_serves_every_experiment_that_has_it(work):
    work("+experiment=table1_pg19", "row=landmark_2048_k4")
    work("+experiment=table2_granularity", "row=per_head_2048_k2")
    work("+experiment=table2_granularity", "row=per_token_and_head_2048_k4")
    assert len(work.evaluated) == 0
    contents, found = work.launches()
    assert {launch.config.name: set(launch.found(contents)) for launch in found} == {
        "table1_pg19": {"landmark_2048_k4"},
        "table2_granularity": {"per_head_2048_k2", "per_token_and_head_2048_k4"},
    }
    assert rows_without_launch(contents, found) == []
    assert len(rows_without_launch(contents, found[:1])) == 1


def test_launches_differ_by_what_decides_numbers_and_have_all_rows(work, tmp_path, books):
    work(*QUICK, "row=plain_512")
    work(*QUICK, "row=last_blocks_2048", "trainer.threads=2", "eval.batch_size=3")
    work(*QUICK, "row=plain_512", "seeds=[0,1]")
    other = tmp_path / "other"
    for split in ("train", "validation", "test"):
        (other / split).mkdir(parents=True)
        (other / split / "1.txt").write_text("another text " * 2000)
    work.task(*QUICK, "row=plain_512", *(word.replace(str(books), str(other)) for word in work.common))
    contents, found = work.launches()
    assert sorted((len(launch.rows["plain_512"]), list(launch.found(contents))) for launch in found) == [
        (1, ["plain_512"]),
        (1, ["plain_512", "last_blocks_2048"]),
        (2, ["plain_512"]),
    ]
    assert all(len(launch.rows) == 6 for launch in found)
    (there,) = [launch for launch in found if f"data.path={other}" in launch.overrides]
    streams = [contents.rows[launch.rows["plain_512"][0].id]["settings"]["stream"] for launch in found]
    assert [launch is there for launch in found] == [streams.count(stream) == 1 for stream in streams]


def test_cells_of_a_grid_are_one_launch(work):
    for k in (2, 4):
        work("+experiment=sweep_k_local", f"retrieval.k={k}", "eval.local=250")
    contents, (launch,) = work.launches()
    assert {"k2_local250", "k4_local250"} <= set(launch.found(contents))
    assert launch.cells["k4_local250"] == {"retrieval.k": "4", "eval.local": "250"}


def test_rows_of_no_experiment_or_of_another_one_by_now(work, monkeypatch):
    work("model=transformer")
    work(*QUICK, "row=plain_512")
    monkeypatch.setattr("landmark.experiment.launches.named", lambda config: {"plain_512": "model=landmark"})
    contents, found = work.launches()
    assert found == []
    assert len(rows_without_launch(contents, found)) == 2


def test_of_an_experiment_each_run_and_row(work, capsys):
    assert status(work, capsys, *QUICK).startswith(f"{FIRST}8 missing\n")
    assert not work.output.exists()
    work(*QUICK, "row=plain_512")
    before = {path: path.stat().st_mtime_ns for path in work.output.rglob("*") if path.is_file()}
    said = status(work, capsys, *QUICK)
    assert said.startswith(f"{FIRST}2 done, 6 missing\n")
    assert state(said, "row plain_512") == ("done", "")
    assert state(said, "row last_blocks_2048") == ("missing", "")
    assert state(said, "run transformer-pg19-nano-") == ("done", "")
    assert {path: path.stat().st_mtime_ns for path in work.output.rglob("*") if path.is_file()} == before
    assert status(work, capsys, *QUICK, "row=plain_512").startswith(f"{FIRST}2 done\n")  # the arrow up, and a task
    free = ("model=landmark", "retrieval.k=2", "name=mine")
    work(*free)
    said = status(work, capsys, *free)
    assert said.startswith("mine (nano, pg19, bytes, eval.tokens=8192, ")
    assert said.splitlines()[0].endswith(": 2 done")


def test_of_all_launches_the_command_does_the_rest(work, capsys):
    work(*QUICK, "row=plain_512")
    work("+experiment=table2_granularity", "row=per_head_2048_k2", "seeds=[0,1]")
    work("model=landmark", "retrieval.k=7")
    said = status(work, capsys)
    assert f"{FIRST}2 done, 6 missing\n" in said
    assert re.search(r"^  missing: run landmark-\S+, row twice_last_blocks, row twice_landmarks, ", said, re.MULTILINE)
    assert "table2_granularity (nano, pg19, bytes, eval.tokens=8192, seeds=[0,1]): 4 done, 16 missing" in said
    assert "no experiment, or another one by now: 1 rows done\n" in said
    assert "not begun: ablation_retrieval, " in said
    rests = [shlex.split(line.partition(": ")[2]) for line in said.splitlines() if line.startswith("  the rest: ")]
    assert len(rests) == 2
    for words in rests:
        assert words[:2] == ["python", "run.py"]
        work.task(*words[2:])
    said = status(work, capsys)
    assert f"{FIRST}8 done\n" in said
    assert "table2_granularity (nano, pg19, bytes, eval.tokens=8192, seeds=[0,1]): 20 done\n" in said
    assert (work.trained, work.evaluated) == ([], [])


@pytest.mark.parametrize("words", [QUICK, ()])
def test_a_run_at_work_is_running_and_a_killed_one_has_stopped(work, capsys, words):
    work(*QUICK, "row=plain_512", "train.steps=3000")
    (run,), (row,) = ([*(work.output / "records" / kind).iterdir()] for kind in ("runs", "rows"))
    run.unlink()
    if not words:
        row.unlink()
    given = [*words, "train.steps=3000"] if words else []
    process = hold(work.output, "runs", run.stem)
    try:
        assert state(status(work, capsys, *given), "run transformer-pg19-nano-") == ("running", "step 190 of 3,000")
    finally:
        process.kill()
        process.join()
    said = status(work, capsys, *given)
    assert state(said, "run transformer-pg19-nano-") == ("stopped", "step 190 of 3,000")
    assert ("quickstart:\n  run transformer" in said) == (not words)
