"""Damaged files are one line that names the file, the key and the remedy."""

import json

import pytest

from landmark.config.saved import trained_with
from landmark.experiment.jobs import read_run
from landmark.utils.errors import UserError
from landmark.utils.files import read_json
from landmark.utils.metrics_csv import read_metrics

VALUES = [
    None,
    [],
    3,
    "text",
    {},
    {"config": None},
    {"config": {"train": None}},
    {"config": {"train": {"steps": "two"}}},
]


@pytest.mark.parametrize("value", VALUES, ids=json.dumps)
def test_a_launch_file(tmp_path, value):
    (tmp_path / "launch.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"launch\.json.*: delete it, training the run writes it anew"):
        trained_with(tmp_path)


@pytest.mark.parametrize("value", [None, [], {}, {"model": {}}, {"model": {}, "tokenizer": None}], ids=json.dumps)
def test_a_run_file(tmp_path, value):
    (tmp_path / "run.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=r"run\.json.*: name another run="):
        read_run(tmp_path)


@pytest.mark.parametrize("value", [None, [], 3])
def test_damaged_records_do_not_end_the_report(work, capsys, value):
    """Each has another part that is no object."""
    work("+experiment=quickstart", "data=pg19", "seeds=null")
    paths = sorted((work.output / "records" / "rows").iterdir())
    damaged = dict(zip(("settings", "labels", "results", "provenance"), paths[:-1]))
    for part, path in damaged.items():
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {part: value}))
    for task in ("report", "status"):
        work.task(f"output={work.output}", f"task={task}")
        said = capsys.readouterr().out
        assert len(damaged) == 4
        for part, path in damaged.items():
            assert f"{path}: {part} is {json.dumps(value)}, not an object" in said


@pytest.mark.parametrize("change", ["settings", "results"])
def test_an_edited_record_is_refused(work, change):
    """It would stand in a table with the wrong number, or as the row that it is not."""
    work("+experiment=quickstart", "data=pg19", "row=plain_512")
    (path,) = (work.output / "records" / "rows").iterdir()
    record = json.loads(path.read_text())
    record["settings" if change == "settings" else "results"]["tokens"] = 1
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=rf"{path.name} was altered: .*: delete it to make it anew"):
        work("+experiment=quickstart", "data=pg19", "row=plain_512")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step,train/loss\n1,x\n", "line 2: could not convert"),
        ("step,train/loss\n1,2\nx,2\n", "line 3: invalid literal"),
        ("train/loss\n2\n", "has no column step"),
        ("step,train/loss\n1,2\xff\n", "is no text"),
    ],
)
def test_metrics(tmp_path, text, said):
    path = tmp_path / "metrics.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=rf"metrics\.csv.*{said}.*: delete it, the training goes on"):
        read_metrics(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\ud800"])
def test_json_of_any_kind(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path)


def test_keys_are_named(tmp_path):
    (tmp_path / "a.json").write_text('{"steps": true}')
    with pytest.raises(UserError, match=r"a\.json: steps is true, not a whole number: mend it"):
        read_json(tmp_path / "a.json", {"steps": int}, "mend it")
    with pytest.raises(UserError, match=r"a\.json is not whole, name is missing: delete it to make it anew"):
        read_json(tmp_path / "a.json", {"name": str})
