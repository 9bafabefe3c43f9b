"""Tables that are killed, or started twice, end as one that was left alone; faults end in one line."""

import random
from pathlib import Path

import pytest

from experiments.survival.outcome import content, differences, records
from experiments.survival.soak import Kill, Reference, killed_table, undisturbed
from experiments.survival.victim import Victim

TINY = ["train.steps=24", "train.validate_every=12", "eval.tokens=16384", "data.max_documents=40"]
STAGES = ["prepare", "train transformer_xl", "evaluate", "table"]


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
    """Each run is trained by one of the two, and both end with the same table."""
    both = [Victim(tmp_path, TINY, log=f"log{number}") for number in range(2)]
    for victim in both:
        victim.finish()
    assert differences(both[0].output, reference.output) == []
    said = [victim.said() for victim in both]
    for run in (tmp_path / "outputs" / "runs").iterdir():
        assert sum(f"{run.name}: training for" in each for each in said) == 1, said


def test_a_changed_byte_is_a_difference(reference, tmp_path):
    found = content(reference.output)
    weights = [path for path in found if path.endswith("model.safetensors")]
    assert len(weights) == 3
    assert len([path for path in found if path.endswith(".bin")]) == 3
    assert len([path for path in found if path.endswith("metrics.csv")]) == 3
    assert [path for path in found if Path(path).name == "nano-stdlib-bytes.csv"]
