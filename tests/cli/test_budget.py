"""A budget of time: commands that end with it or are killed, and go on, make the records that one command makes."""

import itertools
import os
import signal
import time

import pytest

from landmark.experiment.records import Records
from landmark.experiment.runner import Runner
from landmark.training.checkpointing import checkpoints

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


def counting(monkeypatch, killed_at=None):
    """Let the time be counted by those who look at it: a second each time. killed_at: then this process is killed."""
    began, count = time.time(), itertools.count(1)

    def look():
        if (seconds := next(count)) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return began + seconds

    monkeypatch.setattr(time, "time", look)


def losses(output):
    return {key: record["results"]["segments"] for key, record in Records(output).read_all().rows.items()}


def test_commands_that_end_early_make_the_same_records(command, monkeypatch):
    assert command(*BOTH, "output=whole").code == 0
    parts = [*BOTH, "output=parts"]
    for killed_at in (9, 16):
        if not (child := os.fork()):
            counting(monkeypatch, killed_at)
            command(*parts)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    done, ends = None, []
    while done is None or done.code:
        with monkeypatch.context() as patch:
            counting(patch)
            done = command(*parts, "trainer.budget=0.2")
        ends.append(done.code)
        assert len(ends) < 9
    assert ends[0] == 124
    assert set(ends) == {124, 0}
    assert losses("parts") == losses("whole")
    assert len(losses("whole")) == 4


def test_a_training_ends_with_a_checkpoint_and_goes_on(command, here):
    """With a budget that is used up at once every command takes one step."""
    words = ("+experiment=second", "row=landmark_k2", "task=train", "trainer.budget=1e-9")
    for step in (1, 2):
        done = command(*words)
        assert done.code == 124
        (folder,) = here.folder.glob("outputs/runs/*/checkpoints")
        assert checkpoints(folder)[0].name == f"step-0000000{step}.ckpt"
        assert f"step-0000000{step}.ckpt is written" in done.err


def test_no_row_begins_that_would_not_end(command, monkeypatch):
    """The rate of its first texts says how long a row takes. Rows whose run is trained come first."""
    assert command("+experiment=first", "row=landmark_64").code == 0
    begun = []
    evaluate = Runner.evaluate
    monkeypatch.setattr(Runner, "evaluate", lambda self, job: begun.append(job.name) or evaluate(self, job))
    with monkeypatch.context() as patch:
        counting(patch)
        done = command("+experiment=first", "trainer.budget=0.05")
    assert done.code == 124
    assert begun == ["landmark_64", "landmark_128", "plain_64"]
    assert "landmark_128: it would take" in done.out
    assert "plain_64: not begun, the budget is used" in done.out
    assert "the same command goes on from here: landmark_128, plain_64" in done.err
