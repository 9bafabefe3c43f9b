"""A row's identity is computed once on its way from the command to its record."""

from collections import Counter

import pytest

from landmark.experiment import identity


@pytest.fixture
def counted(monkeypatch):
    """How often each identity was computed."""
    calls = Counter()

    def counting(compute):
        def count(*arguments):
            calls[compute.__name__] += 1
            return compute(*arguments)

        return count

    for compute in (identity.run_settings, identity.row_settings):
        monkeypatch.setattr(identity, compute.__name__, counting(compute))
    return calls


@pytest.mark.parametrize("task", ["auto", "evaluate"])
def test_identities_are_computed_once_a_row(work, counted, task):
    """Also where the table is shown in the end."""
    work("+experiment=quickstart", "data=pg19", f"task={task}")
    assert len(work.evaluated) == 6
    assert counted == {"run_settings": 6, "row_settings": 6}


def test_identities_are_computed_once_a_row_and_seed(work, counted):
    work("+experiment=quickstart", "data=pg19", "row=landmark_2048", "seeds=[0,1,2]")
    assert len(work.evaluated) == 3
    assert counted == {"run_settings": 3, "row_settings": 3}
