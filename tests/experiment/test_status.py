"""task=status: what is done, running, failed or missing, and the command that does the rest."""

import re
import shlex
import subprocess
import sys

import pytest

from landmark.experiment.records import Records
from landmark.utils.errors import UserError


def state(said, what):
    """State and note of a run or a row."""
    return re.search(rf"^  {what}\S*  +(\w+) *(.*)$", said, re.MULTILINE).groups()


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_before_anything_is_made_all_is_missing_and_nothing_is_made(work, capsys):
    work("+experiment=quickstart", "data=pg19", "task=status")
    said = capsys.readouterr().out
    assert said.startswith("quickstart (nano, pg19, bytes, eval.tokens=8192): 8 missing\n")
    assert not work.output.exists()


def test_states_after_a_row_and_an_error(work, capsys):
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    work.fail_at, work.error = "landmark_2048", ValueError("a landmark\nis lost")
    with pytest.raises(ValueError, match="is lost"):
        work("+experiment=quickstart", "data=pg19", "row=landmark_2048")
    before = files(work.output)
    capsys.readouterr()
    work("+experiment=quickstart", "data=pg19", "task=status")
    said = capsys.readouterr().out
    assert said.startswith("quickstart (nano, pg19, bytes, eval.tokens=8192): 3 done, 1 failed, 4 missing\n")
    assert state(said, "row plain_512") == ("done", "")
    assert state(said, "row last_blocks_2048") == ("missing", "")
    assert state(said, "run landmark-pg19-nano-") == ("done", "")
    assert state(said, "row landmark_2048") == ("failed", "ValueError: a landmark is lost")
    assert files(work.output) == before


def test_interrupt_and_error_of_the_user_are_told_in_their_words(work, capsys):
    for error, told in (
        (KeyboardInterrupt(), "interrupted"),
        (UserError("row: it is too long"), "row: it is too long"),
    ):
        work.fail_at, work.error = "plain_512", error
        with pytest.raises(type(error)):
            work("+experiment=quickstart", "data=pg19", "row=plain_512")
        work("+experiment=quickstart", "data=pg19", "task=status")
        assert state(capsys.readouterr().out, "row plain_512") == ("failed", told)
    work.fail_at = None
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    assert not list((work.output / "attempts").iterdir())


def test_of_all_experiments_the_command_does_the_rest(work, capsys):
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    work("+experiment=table2_granularity", "row=per_head_2048_k2", "seeds=[0,1]")
    work.task("task=status", f"output={work.output}")
    said = capsys.readouterr().out
    assert "quickstart (nano, pg19, bytes, eval.tokens=8192): 2 done, 5 missing\n" in said
    assert re.search(r"^  missing: row twice_last_blocks, row twice_landmarks, ", said, re.MULTILINE)
    assert "table2_granularity (nano, pg19, bytes, eval.tokens=8192, seeds=[0,1]): 4 done, 8 missing" in said
    assert "not begun: ablation_retrieval, " in said
    rests = [shlex.split(line.partition(": ")[2]) for line in said.splitlines() if line.startswith("  the rest: ")]
    assert len(rests) == 2
    for words in rests:
        assert words[:2] == ["python", "run.py"]
        work.task(*words[2:])
    capsys.readouterr()
    work.task("task=status", f"output={work.output}")
    said = capsys.readouterr().out
    assert "quickstart (nano, pg19, bytes, eval.tokens=8192): 8 done\n" in said
    assert "table2_granularity (nano, pg19, bytes, eval.tokens=8192, seeds=[0,1]): 20 done\n" in said
    assert (work.trained, work.evaluated) == ([], [])


def test_the_command_line_of_a_row_and_a_task_more(work, capsys):
    """The arrow up, and `task=status`: of rows that are chosen, and of a row without an experiment."""
    chosen = ("+experiment=quickstart", "data=pg19", "row=plain_512")
    work(*chosen)
    work(*chosen, "task=status")
    assert "quickstart (nano, pg19, bytes, eval.tokens=8192): 2 done\n" in capsys.readouterr().out
    free = ("model=landmark", "retrieval.k=2", "name=mine")
    work(*free, "task=status")
    assert "mine (nano, pg19, bytes, eval.tokens=8192, " in (said := capsys.readouterr().out)
    assert said.splitlines()[0].endswith(": 2 missing")
    work(*free)
    work(*free, "task=status")
    assert capsys.readouterr().out.splitlines()[-3].endswith(": 2 done")


def test_status_of_all_knows_rows_of_no_experiment(work, capsys):
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    work("model=landmark", "retrieval.k=2")
    work.fail_at, work.error = "other", ValueError("lost")
    with pytest.raises(ValueError, match="lost"):
        work("model=landmark", "retrieval.k=3", "name=other")
    capsys.readouterr()
    work.task("task=status", f"output={work.output}")
    said = capsys.readouterr().out
    assert "no experiment: 1 done, 1 failed\n  row other  failed  ValueError: lost\n" in said


AT_WORK = """
import sys, time
from landmark.experiment.records import Records
records = Records(sys.argv[1])
labels = {"size": "nano", "data": "pg19", "tokenizer": "bytes", "seed": 0, "run": sys.argv[3]}
with records.lock("runs", sys.argv[2]), records.attempt("runs", sys.argv[2], {"train": {"steps": 3000}}, labels):
    print("at work", flush=True)
    time.sleep(600)
"""


def test_a_run_at_work_is_running_and_a_killed_one_has_failed(work, capsys):
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    (path,) = (work.output / "records" / "runs").iterdir()
    (folder,) = (work.output / "runs").iterdir()
    path.unlink()
    command = [sys.executable, "-c", AT_WORK, str(work.output), path.stem, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "at work\n"
            assert Records(work.output).is_locked("runs", path.stem)
            capsys.readouterr()
            work("+experiment=quickstart", "data=pg19", "task=status")
            what, note = state(capsys.readouterr().out, "run transformer-pg19-nano-")
            assert what == "running"
            assert re.match(rf"step 190 of 3,000, since \S+, process {process.pid} on \S+", note)
        finally:
            process.kill()
    assert not Records(work.output).is_locked("runs", path.stem)
    work("+experiment=quickstart", "data=pg19", "task=status")
    told = state(capsys.readouterr().out, "run transformer-pg19-nano-")
    assert told == ("failed", "step 190 of 3,000, no error was noted: the process was killed, or its machine went down")
