"""A row's identity is computed once on its way from the command to its record."""

import json
from collections import Counter

import pytest

from landmark.experiment import identity
from tests.experiment.holding import hold


@pytest.fixture
def counted(monkeypatch):
    """How often each identity was computed."""
    calls = Counter()

    def counting(compute):
        def count(*arguments):
            calls[compute.__name__] += 1
            return compute(*arguments)

        return count

    for compute in (identity.run_settings, identity.row_settings):
        monkeypatch.setattr(identity, compute.__name__, counting(compute))
    return calls


@pytest.mark.parametrize(
    ("words", "count"), [("task=auto", 6), ("task=evaluate", 6), ("row=landmark_2048 seeds=[0,1,2]", 3)]
)
def test_identities_are_computed_once_a_row_and_seed(work, counted, words, count):
    """Also where the table is shown in the end."""
    work("+experiment=quickstart", "data=pg19", *words.split())
    assert len(work.evaluated) == count
    assert counted == {"run_settings": count, "row_settings": count}


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
