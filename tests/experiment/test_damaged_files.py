"""Damaged files are one line that names the file, the key and the remedy; what is whole is found beside them."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from landmark.config.saved import trained_with
from landmark.experiment.identity import digest
from landmark.experiment.jobs import read_run
from landmark.experiment.records import Records, sweep
from landmark.training.checkpointing import AtomicCheckpointIO, checkpoint_path, checkpoints, find_checkpoint, hash_path
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
    with pytest.raises(UserError, match="is no file, but a folder"):
        read_json(tmp_path)


def test_keys_are_named(tmp_path):
    (tmp_path / "a.json").write_text('{"steps": true}')
    with pytest.raises(UserError, match=r"a\.json: steps is true, not a whole number: mend it"):
        read_json(tmp_path / "a.json", {"steps": int}, "mend it")
    with pytest.raises(UserError, match=r"a\.json is not whole, name is missing: delete it to make it anew"):
        read_json(tmp_path / "a.json", {"name": str})


NAMES = st.sampled_from("ab")
STEPS = st.integers(1, 4)
NUMBERS = st.floats(0, 9)


EDITS = {  # of a record that stays JSON
    "another result": lambda record: record["results"].update(loss=99.0),
    "another row": lambda record: record["settings"].update(name="c"),
    "another name": lambda record: record.update(id=digest({})),
    "a part is missing": lambda record: record.pop("labels"),
    "no hash": lambda record: record.pop("sha256"),
}


class Stopped(BaseException):
    """Ends the writing of a file at a rename. tests/kills.py sends SIGKILL at every change of a file."""


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "lost":
        path.unlink()
        return
    if how in EDITS:
        EDITS[how](record := json.loads(content))
        content = json.dumps(record).encode()
    elif how == "cut":
        del content[len(content) // 2 :]
    elif how == "flipped":
        content[len(content) // 2] ^= 1
    else:
        content = b""
    path.write_bytes(content)


class Files(RuleBasedStateMachine):
    """Records and checkpoints that are written, stopped while they are, damaged and found, in any order.

    expected: results of records and weights of checkpoints; None of one that was damaged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.records, self.run = Records(self.folder), self.folder / "runs" / "run" / "checkpoints"
        self.expected_records, self.expected_checkpoints = {}, {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def write(self, save: Callable[[], object], stopped_at: int | None) -> bool:
        """Whether it was written. stopped_at: the rename before which the writing ends."""
        renamed, replace = 0, os.replace

        def count(*paths: Any) -> None:
            nonlocal renamed
            renamed += 1
            if renamed == stopped_at:
                raise Stopped
            replace(*paths)

        with pytest.MonkeyPatch.context() as patch, suppress(Stopped):
            patch.setattr(os, "replace", count)
            save()
        return renamed != stopped_at

    @rule(name=NAMES, number=NUMBERS, stopped_at=st.sampled_from([None, None, 1]))
    def save_record(self, name: str, number: float, stopped_at: int | None) -> None:
        kept = {"settings": {"name": name}, "labels": {"size": "nano"}, "results": {"loss": number}}
        if self.write(lambda: self.records.write("rows", digest({"name": name}), **kept), stopped_at):
            self.expected_records[name] = number

    @rule(name=NAMES, how=st.sampled_from(["cut", "flipped", "empty", *EDITS]))
    def damage_record(self, name: str, how: str) -> None:
        if self.expected_records.get(name) is not None:
            damage(self.records.path("rows", digest({"name": name})), how)
            self.expected_records[name] = None

    @rule(step=STEPS, number=NUMBERS, stopped_at=st.sampled_from([None, None, 1, 2]))
    def save_checkpoint(self, step: int, number: float, stopped_at: int | None) -> None:
        content = {"global_step": step, "settings": {"k": 1}, "weights": torch.full((100,), number)}
        path = checkpoint_path(self.run, step)
        if self.write(lambda: AtomicCheckpointIO().save_checkpoint(content, path), stopped_at):
            self.expected_checkpoints[step] = number
        else:  # an older one of the same step is gone
            self.expected_checkpoints.pop(step, None)

    @rule(step=STEPS, how=st.sampled_from(["cut", "flipped", "empty", "hash lost"]))
    def damage_checkpoint(self, step: int, how: str) -> None:
        if self.expected_checkpoints.get(step) is not None:
            path = checkpoint_path(self.run, step)
            damage(hash_path(path) if how == "hash lost" else path, how.removeprefix("hash "))
            self.expected_checkpoints[step] = None

    @rule()
    def sweep(self) -> None:
        """A command that begins deletes what killed processes left."""
        sweep(self.records, [])
        assert not [*(self.folder / "records").rglob(".*.tmp")]

    @invariant()
    def records_are_whole_or_refused(self) -> None:
        for name, number in self.expected_records.items():
            identity = digest({"name": name})
            if number is None:
                with pytest.raises(UserError, match=rf"{identity}\.json .*delete it to make it anew"):
                    self.records.find("rows", identity)
            else:
                record = self.records.find("rows", identity)
                assert record is not None
                assert record["results"] == {"loss": number}
        whole = {name for name, number in self.expected_records.items() if number is not None}
        contents = self.records.read_all()
        assert len(contents.damaged) == len(self.expected_records) - len(whole)
        assert {record["settings"]["name"] for record in contents.rows.values()} == whole

    @invariant()
    def the_newest_whole_checkpoint_is_found(self) -> None:
        whole = [step for step, number in self.expected_checkpoints.items() if number is not None]
        if self.expected_checkpoints and not whole:
            with pytest.raises(UserError, match=r"\.ckpt is cut short or altered, and no older checkpoint is whole"):
                find_checkpoint(self.run, {"k": 1})
        elif not whole:
            assert find_checkpoint(self.run, {"k": 1}) is None
        else:
            found = find_checkpoint(self.run, {"k": 1})
            assert found is not None
            path, step = found
            assert step == max(whole)
            loaded = AtomicCheckpointIO().load_checkpoint(path)
            assert torch.equal(loaded["weights"], torch.full((100,), self.expected_checkpoints[step]))
        assert not [*self.run.glob(".*.tmp")]
        assert [int(path.stem[5:]) for path in checkpoints(self.run)] == sorted(self.expected_checkpoints, reverse=True)


Files.TestCase.settings = settings(max_examples=25, stateful_step_count=15)
TestFiles = Files.TestCase
