import pytest
from hydra.errors import HydraException

from landmark.config.messages import one_line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.blok_size=3", "model.blok_size: there is no such setting; did you mean model.block_size?"),
        ("modle=landmark", "modle: there is no such setting; did you mean model?"),
        ("train.steps=many", "Value 'many' of type 'str' could not be converted to Integer"),
        ("size=nanoo", "size=nanoo: there is none; did you mean nano?"),
        ("size=huge", "Could not find 'size/huge'; Available options in 'size': nano, paper, small"),
    ],
)
def test_errors_of_hydra_in_one_line(composer, override, said):
    with pytest.raises(HydraException) as error:
        composer([override])
    assert said in one_line(error.value)
    assert "\n" not in one_line(error.value)
    assert "provider" not in one_line(error.value)
