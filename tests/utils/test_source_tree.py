"""Tests of the commit that results name."""

import pytest

from landmark.utils import source_tree as module


def test_a_copy_without_a_repository_is_told_its_commit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_git", lambda *_: None)
    monkeypatch.delenv("LANDMARK_COMMIT", raising=False)
    assert module.commit.__wrapped__() is None
    monkeypatch.setenv("LANDMARK_COMMIT", "abc")
    assert module.commit.__wrapped__() == "abc"
