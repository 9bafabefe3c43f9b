"""Which tables the records of a folder make up."""

import itertools

from landmark.experiment.records import Records
from landmark.experiment.survey import Shelf, launches, unplaced
from tests.configurations import compose_conf


def surveyed(work, experiment=None):
    shelf = Shelf.read(Records(work.output))
    return shelf, list(launches(shelf, compose_conf, experiment))


def test_a_row_serves_every_experiment_that_has_it(work):
    work("+experiment=table1_pg19", "row=landmark_2048_k4")
    work("+experiment=table2_granularity", "row=per_head_2048_k2")
    shelf, found = surveyed(work)
    assert {launch.name: set(launch.found) for launch in found} == {
        "table1_pg19": {"landmark_2048_k4"},
        "table2_granularity": {"per_head_2048_k2", "per_token_and_head_2048_k4"},
    }
    assert unplaced(shelf, found) == []
    assert len(unplaced(shelf, found[:1])) == 1


def test_launches_differ_by_what_decides_numbers(work, books, tmp_path, monkeypatch):
    hours = itertools.count(10)  # apart, for a second may see several launches
    monkeypatch.setattr("landmark.experiment.provenance._now", lambda: f"2026-01-01T{next(hours)}:00:00+00:00")
    quick = ["+experiment=quickstart", "data=pg19", "row=plain_512"]
    work(*quick)
    work(*quick[:2], "row=plain_360", "trainer.threads=2", "eval.batch_size=3")
    work(*quick, "seeds=[0,1]")
    other = tmp_path / "other"
    for split in ("train", "validation", "test"):
        (other / split).mkdir(parents=True)
        (other / split / "1.txt").write_text("another text " * 2000)
    work.task(*quick, *(word.replace(str(books), str(other)) for word in work.common))
    _, found = surveyed(work)
    assert [(len(launch.entries["plain_512"]), list(launch.found)) for launch in found] == [
        (1, ["plain_512", "plain_360"]),
        (2, ["plain_512"]),
        (1, ["plain_512"]),
    ]
    assert ["trainer.threads=2" in launch.overrides for launch in found] == [True, False, False]
    first, _, last = (launch.entries["plain_512"][0].record for launch in found)
    assert first["settings"]["stream"] != last["settings"]["stream"]
    assert f"data.path={other}" in found[-1].overrides


def test_rows_that_differ_in_their_samples_alone_are_told_apart(work):
    tiny = ["train.steps=2"]
    passkey = [word for word in work.common if not word.startswith(("data.path", "eval.tokens"))]
    for row in ("landmark_512", "landmark-needles4_512"):
        work.task("+experiment=figure3_passkey", *passkey, *tiny, f"row={row}")
    shelf, found = surveyed(work, "figure3_passkey")
    assert shelf.damaged == []
    (launch,) = found
    records = {name: entry.record for name, (entry,) in launch.entries.items() if entry.record is not None}
    assert {name: record["labels"]["row"] for name, record in records.items()} == {
        "landmark_512": "landmark_512",
        "landmark-needles4_512": "landmark-needles4_512",
    }


def test_what_cannot_be_read_or_composed_is_told(work):
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    (path,) = (work.output / "records" / "rows").iterdir()
    own = compose_conf(["+experiment=quickstart"]).rows.plain_512.split()
    work.edit(path, labels={"overrides": ["+experiment=quickstart", "gone=1", *own]})
    (path.parent / "0123456789.json").write_text("[]")
    shelf, found = surveyed(work)
    assert found == []
    damaged, old = shelf.damaged
    assert "0123456789.json is not a whole record" in damaged
    assert old.startswith("quickstart as it was launched is no table, its rows are among the others: ")
    assert "gone" in old
    assert len(unplaced(shelf, found)) == 1
