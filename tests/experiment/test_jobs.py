"""Rows and runs that another process makes."""

import json

import pytest

from tests.forked import hold


@pytest.mark.parametrize("kind", ["rows", "runs"])
def test_what_another_process_makes_waits_for_all_that_it_does_not(work, kind):
    """A row, or the run of all rows but one, until `plain_512` is evaluated."""
    given = ("+experiment=quickstart", "data=pg19", "task=evaluate")
    work(*given)
    rows = list(work.evaluated)
    names = {file: json.loads(file.read_text())["labels"]["row"] for file in (work.output / "records/rows").iterdir()}
    record = next(file for file, name in names.items() if name == "twice_landmarks")
    if kind == "runs":
        folder = json.loads(record.read_text())["labels"]["run"]
        (record,) = (work.output / "records/runs").glob(f"{folder[-10:]}.json")
    for file in [*names, record]:
        file.unlink(missing_ok=True)
    other, evaluate = hold(work.output, kind, record.stem), work.evaluate

    def kill_at_plain(job, inputs):
        if job.name == "plain_512":
            other.kill()
            other.join()
        return evaluate(job, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("landmark.experiment.runner.evaluate_row", kill_at_plain)
        work(*given)
    waiting = ["twice_landmarks"] if kind == "rows" else [row for row in rows if row != "plain_512"]
    rows = [row for row in rows if row not in waiting]
    then = rows.index("plain_512") + 1
    assert work.evaluated == [*rows[:then], *waiting, *rows[then:]]
