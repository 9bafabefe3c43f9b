"""Files of runs and rows: written, locked, damaged, found and swept away."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
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

from landmark.experiment.config.saved import trained_with
from landmark.experiment.runs.identity import digest
from landmark.experiment.runs.jobs import read_run
from landmark.experiment.runs.records import Records, sweep
from landmark.experiment.training.checkpointing import AtomicCheckpointIO, find_checkpoint
from landmark.utils import source_tree
from landmark.utils.checkpoints import checkpoint_path, checkpoints, hash_path
from landmark.utils.errors import UserError
from landmark.utils.files import locked, read_json, sealed
from landmark.utils.metrics_csv import read_metrics
from tests.test_storage import save_memory

LAUNCH = (trained_with, "launch.json", r".*: delete it, training the run writes it anew")
RUN = (read_run, "run.json", r".*: name another run=")
METRICS = "metrics.csv"
CONFIG = ("{}", '{"config": {"train": {"steps": "two"}}}')
DAMAGED = [  # what reads which file, its content, what is said
    *((*LAUNCH[:2], content, LAUNCH[2]) for content in ("[]", *CONFIG)),
    *((*RUN[:2], content, RUN[2]) for content in ("null", '{"model": {}, "tokenizer": null}')),
    *(
        (read_metrics, METRICS, content, rf".*{said}.*: delete it, the training goes on")
        for content, said in (
            ("step,train/loss\n1,x\n", "line 2: could not convert"),
            ("step,train/loss\n1,2\nx,2\n", "line 3: invalid literal"),
            ("train/loss\n2\n", "has no column step"),
            ("step,train/loss\n1,2\udcff\n", "is no text"),
        )
    ),
    *(
        (read_json, "a.json", text, " is not valid JSON")
        for text in ("", '{"a": 1', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\udcff")
    ),
    (lambda path: read_json(path.parent), "a.json", "{}", "is no file, but a folder"),
    *(
        (lambda path, asked=asked: read_json(path, *asked), "a.json", content, message)
        for content, asked, message in (
            ('{"steps": true}', ({"steps": int}, "mend it"), ": steps is true, not a whole number: mend it"),
            ('{"steps": 1}', ({"name": str},), " is not whole, name is missing: delete it to make it anew"),
        )
    ),
]


@pytest.mark.parametrize(("read", "name", "content", "message"), DAMAGED)
def test_a_damaged_file_is_one_line(tmp_path, read, name, content, message):
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message if "folder" in message else f"{re.escape(name)}{message}"):
        read(path.parent if read in (trained_with, read_run) else path)


def test_a_record_says_where_it_was_made_and_one_that_is_no_number_is_not_written(tmp_path, monkeypatch):
    records, identity = Records(tmp_path), digest({})
    with pytest.raises(UserError, match="not a finite number"):
        records.write("rows", identity, {}, {}, {"perplexity": float("nan")})
    assert records.find("rows", identity) is None
    written = records.write("rows", identity, {}, {"size": "nano"}, {"perplexity": 3.25})
    assert records.find("rows", identity) == written
    assert written["provenance"]["versions"]["python"]
    monkeypatch.setattr(source_tree, "_git", lambda *_: None)
    monkeypatch.delenv("LANDMARK_COMMIT", raising=False)
    assert source_tree.commit.__wrapped__() is None
    monkeypatch.setenv("LANDMARK_COMMIT", "abc")
    assert source_tree.commit.__wrapped__() == "abc"


EDITS = {  # of a record that stays JSON
    "another result": lambda record: record["results"].update(loss=99.0),
    "another row": lambda record: record["settings"].update(name="c"),
    "another row, sealed": lambda record: record.update(sealed(record | {"settings": {"name": "c"}})),
    "another name": lambda record: record.update(id=digest({})),
    "a part is missing": lambda record: record.pop("labels"),
    "no hash": lambda record: record.pop("sha256"),
}


class Stopped(BaseException):
    """Ends the writing of a file at a rename. tests/test_storage.py sends SIGKILL at every change of a file."""


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

    @rule(name=st.sampled_from("ab"), number=st.floats(0, 9), stopped_at=st.sampled_from([None, None, 1]))
    def save_record(self, name: str, number: float, stopped_at: int | None) -> None:
        kept = {"settings": {"name": name}, "labels": {"size": "nano"}, "results": {"loss": number}}
        if self.write(lambda: self.records.write("rows", digest({"name": name}), **kept), stopped_at):
            self.expected_records[name] = number

    @rule(name=st.sampled_from("ab"), how=st.sampled_from(["cut", "flipped", "empty", *EDITS]))
    def damage_record(self, name: str, how: str) -> None:
        if self.expected_records.get(name) is not None:
            damage(self.records.path("rows", digest({"name": name})), how)
            self.expected_records[name] = None

    @rule(step=st.integers(1, 4), number=st.floats(0, 9), stopped_at=st.sampled_from([None, None, 1, 2]))
    def save_checkpoint(self, step: int, number: float, stopped_at: int | None) -> None:
        content = {"global_step": step, "settings": {"k": 1}, "weights": torch.full((2000,), number)}
        path = checkpoint_path(self.run, step)
        if self.write(lambda: AtomicCheckpointIO().save_checkpoint(content, path), stopped_at):
            self.expected_checkpoints[step] = number
        else:  # an older one of the same step is gone
            self.expected_checkpoints.pop(step, None)

    @rule(step=st.integers(1, 4), how=st.sampled_from(["cut", "flipped", "empty", "hash lost"]))
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
            path, step = found
            assert step == max(whole)
            loaded = AtomicCheckpointIO().load_checkpoint(path)
            assert torch.equal(loaded["weights"], torch.full((2000,), self.expected_checkpoints[step]))
        assert not [*self.run.glob(".*.tmp")]
        assert [int(path.stem[5:]) for path in checkpoints(self.run)] == sorted(self.expected_checkpoints, reverse=True)


Files.TestCase.settings = settings(max_examples=25, stateful_step_count=15)
TestFiles = Files.TestCase


KILLED = """
import os, signal, sys
from landmark.utils import files
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomic(sys.argv[1], bytes(100_000))
"""


def killed_while_it_wrote(path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_command_that_makes_runs_deletes_what_killed_ones_left(work):
    """Temporary files that nobody has locked, and checkpoints of runs with weights and a record."""
    work("+experiment=quickstart", "data=pg19")
    first, second = (work.output / "runs").iterdir()
    for path in (first / "model.safetensors", work.output / "records" / "rows" / "a.json", work.output / "report.html"):
        killed_while_it_wrote(path)
    for folder in (first, second):
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "step-00000001.ckpt").touch()
    (second / "model.safetensors").unlink()
    left = list(work.output.rglob(".*.tmp"))
    assert len(left) == 3
    work("+experiment=quickstart", "data=pg19", "task=prepare")  # which makes no runs
    assert list(work.output.rglob(".*.tmp")) == left
    with locked(left[0]) as is_ours:
        assert is_ours
        work("+experiment=quickstart", "data=pg19")
        assert list(work.output.rglob(".*.tmp")) == left[:1]
    assert not (first / "checkpoints").exists()
    assert (second / "checkpoints").exists()  # its weights are gone
    work("+experiment=quickstart", "data=pg19")
    assert list(work.output.rglob(".*.tmp")) == []


def test_a_memory_is_saved_after_a_kill_and_beside_one_that_is_being_saved(tmp_path):
    """Numbers of processes recur: in a container each command may be number 7."""
    for name in (f".book.{os.getpid()}.tmp", ".book.999999.tmp", ".book.1.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layer-0.blocks").touch()
    with locked(tmp_path / ".book.1.tmp"):
        save_memory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"book", ".book.1.tmp"}
