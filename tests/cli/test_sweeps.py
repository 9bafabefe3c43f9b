import pytest

from landmark.cli.sweeps import check_sweeps
from landmark.utils.errors import UserError
from tests.configurations import CONF


@pytest.mark.parametrize("argument", ["+experiment=a,b", "+experiment=glob(*)", "experiment=choice(a,b)"])
def test_two_experiments_at_once_are_refused(argument):
    with pytest.raises(UserError, match="one experiment at a time"):
        check_sweeps(["-m", argument], CONF)


def test_glob_that_matches_nothing_is_refused():
    with pytest.raises(UserError, match="matches nothing in conf/model"):
        check_sweeps(["-m", "model=glob(lstm*)"], CONF)
    check_sweeps(["-m", "model=glob(trans*)"], CONF)


def test_other_sweeps_pass():
    check_sweeps(["-m", "+experiment=a", "row=a,b", "retrieval.k=1,2", "not=an=override", "--flag"], CONF)
