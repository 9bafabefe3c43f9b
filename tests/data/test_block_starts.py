"""Where blocks begin is found once, and kept beside the stream."""

import dataclasses

import numpy as np
import pytest

from landmark.data import block_starts as kept
from landmark.data.block_starts import stored_block_starts
from landmark.data.stream import Stream
from landmark.utils.block_ends import BlockEnds
from landmark.utils.block_places import block_starts

RULE = BlockEnds(8, 3, (7,), 9)


@pytest.fixture
def stream(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 10, 5000).astype(np.uint16)
    return Stream(tmp_path / "train.bin", tokens, "0123", 1, 1, 1)


def count_searches(monkeypatch):
    calls = []
    monkeypatch.setattr(kept, "block_starts", lambda *args: calls.append(1) or block_starts(*args))
    return calls


def test_found_once_for_each_rule_and_content(stream, monkeypatch):
    calls = count_searches(monkeypatch)
    expected = block_starts(stream.tokens, RULE)
    for _ in range(2):
        np.testing.assert_array_equal(stored_block_starts(stream, RULE), expected)
    assert len(calls) == 1
    stored_block_starts(stream, dataclasses.replace(RULE, least=4))
    stored_block_starts(dataclasses.replace(stream, sha256="4567"), RULE)
    assert len(calls) == 3


def test_a_damaged_file_is_made_again(stream, monkeypatch):
    expected = stored_block_starts(stream, RULE).copy()
    (file,) = stream.path.parent.glob("train.blocks-*.npy")
    whole = file.read_bytes()
    for damaged in (b"", whole[:50], whole[:-80]):
        file.write_bytes(damaged)
        np.testing.assert_array_equal(stored_block_starts(stream, RULE), expected)
        assert file.read_bytes() == whole


def test_nothing_is_kept_in_a_folder_that_cannot_be_written_to(stream, monkeypatch):
    def refuse(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(kept, "write_atomic", refuse)
    np.testing.assert_array_equal(stored_block_starts(stream, RULE), block_starts(stream.tokens, RULE))
    assert not list(stream.path.parent.glob("*.npy"))
