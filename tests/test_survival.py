"""Tables that are killed, or started twice, end as one that was left alone; faults end in one line."""

import random
import re
import shutil
import signal

import pytest
from filelock import FileLock

from experiments.survival.outcome import differences, locked, records, wrong_records
from experiments.survival.soak import Kill, Reference, killed_table, undisturbed
from experiments.survival.victim import Victim
from landmark.training.checkpointing import checkpoints

TINY = ["train.steps=24", "train.validate_every=12", "eval.tokens=16384", "data.max_documents=40"]
STAGES = ["prepare", "evaluate", "train landmark", "train transformer_xl"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    return undisturbed(tmp_path_factory.mktemp("reference"), TINY)


def test_killed_and_started_again(reference, tmp_path):
    *kills, differing = killed_table(tmp_path, STAGES, reference, random.Random(0), overrides=TINY)
    assert differing == []
    assert len(kills) == len(STAGES)
    for kill in kills:
        assert isinstance(kill, Kill)
        assert (kill.wrong_records, kill.locks_held) == (0, 0), kill
    assert len(records(reference.output)) == 3 + 4


def test_started_twice_at_once(reference, tmp_path):
    """One of the two trains each run, and both end with the same table."""
    both = [Victim(tmp_path, TINY, log=f"log{number}") for number in range(2)]
    for victim in both:
        victim.finish()
    assert differences(both[0].output, reference.output) == []
    said = [victim.said() for victim in both]
    for run in (tmp_path / "outputs" / "runs").iterdir():
        assert sum(f"{run.name}: training for" in each for each in said) == 1, said


def test_terminated_by_a_cluster_and_queued_again(tmp_path):
    victim = Victim(tmp_path, [*TINY, "train.steps=100000"])
    assert victim.wait_for("train transformer", ["prepare"])
    victim.process.terminate()
    assert victim.process.wait() == 128 + signal.SIGTERM
    assert re.search(r"stopped by SIGTERM, \S+/step-\d+\.ckpt is written: the same command", victim.said())
    (newest, *_) = checkpoints(next(victim.output.glob("runs/*/checkpoints")))
    again = Victim(tmp_path, [*TINY, "train.steps=100000"])
    assert again.wait_for("train transformer")
    again.kill()
    assert f"going on at step {int(newest.stem.partition('-')[2])}\n" in again.said()


def test_what_differs_is_found(reference, tmp_path):
    shutil.copytree(reference.output, tmp_path / "outputs")
    output = tmp_path / "outputs"
    assert differences(output, reference.output) == []
    changed = []
    for pattern in ("data/*/test.bin", "runs/*/model.safetensors", "runs/*/metrics.csv", "records/rows/*.json"):
        path = sorted(output.glob(pattern))[0]
        content = path.read_bytes()
        path.write_bytes(content.replace(b"1", b"2") if path.suffix in (".csv", ".json") else content[:-1] + b"\0")
        changed.append(str(path.relative_to(output)))
    (output / "runs" / ".x.tmp").touch()
    assert set(differences(output, reference.output)) == {*changed, "runs/.x.tmp"}
    assert wrong_records(output, reference.output) == [changed[-1]]
    with FileLock(locks := output / "locks" / "a.lock"):
        assert locked(output) == [locks]
