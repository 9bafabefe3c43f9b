import threading

import pytest

from landmark.experiment.identity import digest
from landmark.experiment.records import Records
from landmark.utils.errors import UserError
from tests.experiment.holding import hold

EMPTY, K4 = digest({}), digest({"k": 4})  # identities of settings


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path)


def test_record_is_found_as_it_was_written(records):
    assert records.find("rows", K4) is None
    written = records.write("rows", K4, {"k": 4}, {"size": "nano"}, {"perplexity": 3.25})
    assert records.find("rows", K4) == written
    assert written["provenance"]["versions"]["python"]
    contents = records.read_all()
    assert (contents.runs, list(contents.rows)) == ({}, [K4])


def test_result_that_is_no_number_leaves_no_record(records):
    with pytest.raises(UserError, match="not a finite number"):
        records.write("rows", EMPTY, {}, {}, {"perplexity": float("nan")})
    assert records.find("rows", EMPTY) is None


def test_a_lock_waits_for_the_process_that_holds_it_and_ends_with_it(records, tmp_path):
    process, taken = hold(tmp_path, "runs", "abc", 600), threading.Event()

    def take():
        with records.lock("runs", "abc"):
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    assert records.is_locked("runs", "abc")
    assert not taken.wait(0.3)
    process.kill()
    process.wait()
    assert taken.wait(60)
