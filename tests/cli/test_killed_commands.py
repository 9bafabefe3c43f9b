"""Commands that are killed and go on, and two that work at once, make the records that one command makes."""

import itertools
import os
import re
import signal
from pathlib import Path

import pytest

from landmark.experiment.runs.records import Records

ROWS = {
    "first": {
        "plain_64": "model=transformer eval.length=64",
        "landmark_64": "model=landmark model.block_size=7 eval.length=64 eval.local=16 retrieval.k=1",
        "landmark_128": "model=landmark model.block_size=7 eval.length=128 eval.local=16 retrieval.k=1",
    },
    "second": {
        "landmark_128": "model=landmark model.block_size=7 eval.length=128 eval.local=16 retrieval.k=1",
        "landmark_k2": "model=landmark model.block_size=7 eval.length=128 eval.local=16 retrieval.k=2",
    },
}
BOTH = ["-m", "+experiment=first,second", "task=evaluate"]
TINY = [
    *("data=documents", "data.path=books", "tokenizer=bytes", "size=nano", "logger=csv", "trainer=cpu"),
    *("trainer.threads=1", "model.num_layers=1", "model.num_heads=2", "model.head_dim=8", "model.mlp_dim=32"),
    *("train.steps=12", "train.batch_size=2", "train.length=64", "train.validate_every=12", "train.validate_batches=1"),
    *("train.checkpoint_every=4", "eval.tokens=2048", "eval.span=512", "eval.batch_size=8"),
]


@pytest.fixture
def command(here):
    """Commands of two experiments that share a training, in a folder with a book."""
    (here.folder / "books").mkdir()
    (here.folder / "books" / "a.txt").write_text("a book of blocks, read in order " * 3000)
    (here.folder / "conf" / "experiment").mkdir(parents=True)
    for name, rows in ROWS.items():
        text = "\n".join(["# @package _global_", f"name: {name}", "rows:", *(f"  {row}: {rows[row]}" for row in rows)])
        (here.folder / "conf" / "experiment" / f"{name}.yaml").write_text(text)
    return lambda *words: here("--config-dir", "conf", *words, *TINY)


def kill_at(number):
    """End this process before it gives a file its name for the n-th time."""
    count, replace = itertools.count(1), os.replace
    os.replace = lambda *places: os.abort() if next(count) == number else replace(*places)


def losses(output):
    return {key: record["results"]["segments"] for key, record in Records(output).read_all().rows.items()}


@pytest.fixture
def whole(command):
    """The losses that one command makes."""
    assert command(*BOTH, "output=whole").code == 0
    assert len(losses("whole")) == 4
    return losses("whole")


def test_killed_commands_that_go_on_make_the_same_records(command, whole):
    parts = [*BOTH, "output=parts"]
    for killed_at in (9, 12, 6):
        if not (child := os.fork()):
            kill_at(killed_at)
            command(*parts)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGABRT
    assert command(*parts).code == 0
    assert losses("parts") == whole


def test_two_that_are_started_at_once_train_each_run_once(command, whole):
    children = []
    for name in ("one", "other"):
        if not (child := os.fork()):
            ended = command(*BOTH, "output=shared")
            Path(name).write_text(ended.out + ended.err)
            os._exit(ended.code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    said = Path("one").read_text() + Path("other").read_text()
    assert len(re.findall(r": training for", said)) == 2
    assert losses("shared") == whole
