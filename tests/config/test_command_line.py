import pytest
from hydra.errors import HydraException

from landmark.config.command_line import check_sweeps, one_line
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


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.blok_size=3", "Key 'blok_size' not in 'ModelConfig'; did you mean 'block_size'?"),
        ("modle=landmark", "did you mean 'model'?"),
        ("train.steps=many", "Value 'many' of type 'str' could not be converted to Integer"),
        ("size=nanoo", "Could not find 'size/nanoo'; Available options in 'size': nano, paper, small"),
    ],
)
def test_errors_of_hydra_in_one_line(composer, override, said):
    with pytest.raises(HydraException) as error:
        composer([override])
    assert said in one_line(error.value)
    assert "\n" not in one_line(error.value)
    assert "provider" not in one_line(error.value)
