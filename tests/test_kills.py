"""Processes that are killed before their n-th change of a file, n drawn at random, and do their work again."""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from landmark.data import prepare
from landmark.data.tokenizers import load_tokenizer
from landmark.experiment.identity import digest
from landmark.experiment.records import Records, sweep
from landmark.utils.metrics_csv import read_metrics
from tests.memory.reading import feed, new_memory, texts
from tests.training.training_case import make_config, make_corpus, run
from tests.workplace import write_books

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
NAMES_ALONE = (".csv", ".json", ".sha256")  # their content has times


def train(folder: Path) -> None:
    sweep(Records(folder), [])
    run(make_config("transformer", steps=12, checkpoint_every=4), folder / "runs")


def save_memory(folder: Path) -> None:
    if (folder / "book").exists():
        return
    q, k, v, _ = texts(60)
    memory = new_memory(k=2)
    feed(memory, q, k, v, [25, 35])
    memory.save(folder / "book", {"chat.json": b"[]"})


def prepare_corpus(folder: Path) -> None:
    if not (folder.parent / "books").exists():
        (folder.parent / "books").mkdir()
        write_books(folder.parent / "books")
    sweep(Records(folder), [folder / "data"])
    prepare("pg19", load_tokenizer("bytes"), folder / "data", path=folder.parent / "books", progress=False)


def write_record(folder: Path) -> None:
    records, settings = Records(folder), {"steps": 3}
    identity, labels = digest(settings), {"size": "nano", "data": "x", "tokenizer": "bytes", "seed": 0}
    sweep(records, [])
    if records.find("rows", identity) is None:
        with records.lock("rows", identity):
            records.write("rows", identity, settings, labels, {"loss": 3.0})


def killed_at(work: Callable[[Path], None], folder: Path, number: int | None) -> tuple[int | None, int]:
    """Do the work in a process of its own. number: of the change before which it is killed; None: never.

    Returns the signal or exit code that ended it, and the changes that it made.
    """
    folder.mkdir(exist_ok=True)
    if work is train:
        make_corpus(folder / "runs" / "data")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            own, changes = os.getpid(), 0

            def count(event: str, given: tuple[Any, ...]) -> None:
                nonlocal changes
                writes = event == "open" and len(given) == 3 and isinstance(given[2], int) and given[2] & os.O_ACCMODE
                if not (writes or event in CHANGES) or os.getpid() != own or str(folder) not in str(given[:2]):
                    return
                changes += 1
                if changes == number:
                    os.kill(own, signal.SIGKILL)

            sys.addaudithook(count)
            with open(folder.with_suffix(".log"), "a") as log:
                for standard in (1, 2):
                    os.dup2(log.fileno(), standard)
            work(folder)
            os.write(writing, str(changes).encode())
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, int(said or 0)


def content(folder: Path) -> dict[str, Any]:
    """All files and folders, those without times with their bytes; of metrics.csv the losses.

    Not checkpoints: when a run has its record, the next start deletes them all (`tests/experiment/test_records.py`).
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.parent.name == "checkpoints":
            continue
        if path.name == "metrics.csv":
            found[str(path.relative_to(folder))] = [(row["step"], row.get("train/loss")) for row in read_metrics(path)]
        else:
            compared = path.is_file() and path.suffix not in NAMES_ALONE
            found[str(path.relative_to(folder))] = path.read_bytes() if compared else None
    return found


def test_what_is_killed_at_any_change_of_a_file_is_whole_afterwards(tmp_path):
    draw, kills = random.Random(1), 0
    works = train, save_memory, prepare_corpus, write_record
    for work in works:
        code, changes = killed_at(work, whole := tmp_path / f"{work.__name__}-whole", None)
        assert (code, changes > 0) == (0, True), whole.with_suffix(".log").read_text()
        expected = content(whole)
        for number in range(2):
            place, at = tmp_path / f"{work.__name__}-{number}", draw.randrange(1, changes + 1)
            code, _ = killed_at(work, place, at)
            kills += code == -signal.SIGKILL
            if code == -signal.SIGKILL and draw.random() < 0.3:  # once more, on the way from there
                kills += killed_at(work, place, draw.randrange(1, changes + 1))[0] == -signal.SIGKILL
            code, _ = killed_at(work, place, None)
            assert code == 0, place.with_suffix(".log").read_text()[-2000:]
            assert content(place) == expected, f"{place}, killed before change {at} of {changes}"
    assert kills >= 2 * len(works)
