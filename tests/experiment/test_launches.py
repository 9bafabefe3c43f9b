"""Which launches an output folder has seen, and what has come of them."""

import itertools
import json

import landmark.data
from landmark.experiment.launches import read_launches, rows_without_launch
from landmark.experiment.records import Records
from tests.configurations import compose_conf


def read(work, experiment=None):
    records = Records(work.output)
    contents = records.read_all()
    return contents, read_launches(records, contents, experiment)


def test_a_row_serves_every_experiment_that_has_it(work):
    work("+experiment=table1_pg19", "row=landmark_2048_k4")
    work("+experiment=table2_granularity", "row=per_head_2048_k2")
    work("+experiment=table2_granularity", "row=per_token_and_head_2048_k4")
    assert len(work.evaluated) == 0
    contents, found = read(work)
    assert {launch.experiment: set(launch.found(contents)) for launch in found} == {
        "table1_pg19": {"landmark_2048_k4"},
        "table2_granularity": {"per_head_2048_k2", "per_token_and_head_2048_k4"},
    }
    assert rows_without_launch(contents, found) == []
    assert len(rows_without_launch(contents, found[:1])) == 1


def test_launches_differ_by_what_decides_numbers(work, books, tmp_path, monkeypatch):
    quick = ["+experiment=quickstart", "data=pg19", "row=plain_512"]
    work(*quick)
    work(*quick[:2], "row=last_blocks_2048", "trainer.threads=2", "eval.batch_size=3")
    work(*quick, "seeds=[0,1]")
    other = tmp_path / "other"
    for split in ("train", "validation", "test"):
        (other / split).mkdir(parents=True)
        (other / split / "1.txt").write_text("another text " * 2000)
    work.task(*quick, *(word.replace(str(books), str(other)) for word in work.common))
    contents, found = read(work)
    assert [(len(launch.rows["plain_512"]), list(launch.found(contents))) for launch in found] == [
        (1, ["plain_512", "last_blocks_2048"]),
        (2, ["plain_512"]),
        (1, ["plain_512"]),
    ]
    assert ["trainer.threads=2" in launch.overrides for launch in found] == [True, False, False]
    first, _, last = (contents.rows[launch.rows["plain_512"][0].row] for launch in found)
    assert first["settings"]["stream"] != last["settings"]["stream"]
    assert f"data.path={other}" in found[-1].overrides


def test_a_launch_has_every_row_of_its_experiment(work):
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    contents, (launch,) = read(work)
    assert list(launch.rows) == [
        "twice_last_blocks",
        "twice_landmarks",
        "twice_second_look",
        "plain_512",
        "landmark_2048",
        "last_blocks_2048",
    ]
    assert list(launch.found(contents)) == ["plain_512"]
    assert launch.compare == compose_conf(["+experiment=quickstart"]).compare
    work("+experiment=quickstart", "data=pg19", "task=train")
    _, (launch,) = read(work)
    assert [len(entries) for entries in launch.rows.values()] == [1] * 6
    runs = {path.stem for path in (work.output / "records" / "runs").iterdir()}
    assert {entry.run for (entry,) in launch.rows.values()} == runs


def test_cells_of_a_grid_are_added_to_its_launch(work):
    for k in (2, 3):
        work("+experiment=sweep_k_local", f"retrieval.k={k}", "eval.local=250")
    contents, (launch,) = read(work)
    assert {"k2_local250", "k3_local250"} <= set(launch.found(contents))
    assert launch.cells["k3_local250"] == {"retrieval.k": "3", "eval.local": "250"}


def test_a_launch_that_fails_is_noted_all_the_same(work):
    work.fail_at, work.error = "twice_last_blocks", ValueError("lost")
    try:
        work("+experiment=quickstart", "data=pg19")
    except ValueError:
        contents, (launch,) = read(work)
    assert launch.found(contents) == {}
    assert [len(entries) for entries in launch.rows.values()] == [1] * 6


def test_settings_alone_are_no_launch(work):
    work("model=transformer")
    contents, found = read(work)
    assert found == []
    assert len(rows_without_launch(contents, found)) == 1


def test_a_note_that_cannot_be_read_is_named(work):
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    (path,) = (work.output / "launches").iterdir()
    whole = json.loads(path.read_text())
    edited = [json.dumps(whole | {"labels": {"size": []}}), json.dumps(whole | {"overrides": [3]})]
    for damaged in ("[]", "{", json.dumps({"rows": {}}), *edited):
        path.write_text(damaged)
        (work.output / "records" / "rows" / "0123456789.json").write_text("[]")
        contents, found = read(work)
        assert found == []
        row, launch = contents.damaged
        assert "0123456789.json is [], not an object with id" in row
        assert str(path) in launch
        assert len(rows_without_launch(contents, found)) == 1
    (work.output / "records" / "rows" / "0123456789.json").unlink()
    work("+experiment=quickstart", "data=pg19", "row=plain_512")  # writes the note anew
    contents, (launch,) = read(work)
    assert list(launch.found(contents)) == ["plain_512"]
    assert contents.damaged == []


def test_launches_beside_each_other_lose_no_row(work):
    """Jobs of a multirun complete one note."""
    names = ["plain_512", "landmark_2048", "last_blocks_2048"]
    for order in itertools.permutations(names, 2):
        for name in order:
            work("+experiment=quickstart", "data=pg19", f"row={name}")
    contents, (launch,) = read(work)
    assert list(launch.found(contents)) == names


def test_a_launch_opens_only_the_tokenizers_of_its_rows(work, monkeypatch):
    """The experiment's own one, here GPT-2's, is no row's: it might need a download."""
    opened, load = [], landmark.data.load_tokenizer

    def note(name, *arguments):
        opened.append(name)
        return load(name, *arguments)

    monkeypatch.setattr(landmark.data, "load_tokenizer", note)
    common = [word for word in work.common if not word.startswith("tokenizer")]
    work.task(*common, "data=pg19", "+rows.only='model=transformer tokenizer=bytes'")
    _, (launch,) = read(work)
    assert launch.labels["tokenizer"] == "bytes"
    assert set(opened) == {"bytes"}
