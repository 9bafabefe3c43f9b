import json
import time

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
    assert [record["id"] for record in records.all("rows")] == [K4]
    assert records.all("runs") == []


@pytest.mark.parametrize("keep", [0, 1, 50, -3])
def test_record_cut_short_is_refused_naming_the_file(records, keep):
    records.write("rows", EMPTY, {}, {}, {})
    path = records.path("rows", EMPTY)
    path.write_text(path.read_text()[:keep])
    with pytest.raises(UserError, match=rf"{EMPTY}\.json .*delete it to make it anew"):
        records.find("rows", EMPTY)


@pytest.mark.parametrize("change", [lambda r: r.pop("results"), lambda r: r.update(id="other")])
def test_record_of_something_else_is_refused(records, change):
    record = records.write("rows", EMPTY, {}, {}, {})
    change(record)
    records.path("rows", EMPTY).write_text(json.dumps(record))
    with pytest.raises(UserError, match="delete it to make it anew"):
        records.find("rows", EMPTY)


def test_result_that_is_no_number_leaves_no_record(records):
    with pytest.raises(UserError, match="not a finite number"):
        records.write("rows", EMPTY, {}, {}, {"perplexity": float("nan")})
    assert records.find("rows", EMPTY) is None


def test_lock_waits_for_the_process_that_holds_it(records, tmp_path):
    process, started = hold(tmp_path, "runs", "abc", 1.0), time.monotonic()
    with records.lock("runs", "abc"):
        assert time.monotonic() - started > 0.5
    process.wait()


def test_killed_process_leaves_no_lock(records, tmp_path):
    process = hold(tmp_path, "runs", "abc", 100)
    process.kill()
    process.wait()
    started = time.monotonic()
    with records.lock("runs", "abc"):
        assert time.monotonic() - started < 10
