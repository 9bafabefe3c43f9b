"""Tables that are killed, or started twice, end as an undisturbed one; faults end with an error of one line."""

import random
import re
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from benchmarks.survival.outcome import differences, locked, records, wrong_records
from benchmarks.survival.soak import Reference, killed_table, undisturbed

pytestmark = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="stages are found in Linux's /proc/locks")
TINY = ["train.steps=24", "train.validate_every=12", "eval.tokens=16384", "data.max_documents=40"]
STAGES = ["prepare", "train transformer", "evaluate"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    return undisturbed(tmp_path_factory.mktemp("reference"), TINY)


def test_killed_and_then_started_twice_at_once(reference, tmp_path):
    """Each remaining run is trained by one of the two processes; the result is that of an undisturbed table."""
    *kills, differing = killed_table(tmp_path, STAGES, reference, random.Random(0), overrides=TINY, processes=2)
    assert differing == []
    assert len(kills) == len(STAGES)
    for kill in kills:
        assert (kill.wrong_records, kill.locks_held) == (0, 0), kill
    assert len(records(reference.output)) == 3 + 4
    said = (tmp_path / "end0").read_text() + (tmp_path / "end1").read_text()
    trained = re.findall(r"^(\S+): training for", said, re.MULTILINE)
    assert trained
    assert len(trained) == len(set(trained))


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
