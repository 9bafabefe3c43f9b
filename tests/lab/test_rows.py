from dataclasses import replace

import pytest

from landmark.config import to_config
from landmark.errors import UserError
from landmark.lab.rows import select


@pytest.fixture
def chosen(composer):
    def choose(*overrides, rows=None, compare=None):
        config = to_config(composer(list(overrides)))
        if rows is not None:
            config = replace(config, rows=rows, compare=compare or {})
        return select(config, list(overrides), composer)

    return choose


def test_row_is_the_command_line_and_its_own_overrides(chosen):
    rows = chosen("size=nano", "train.steps=7", rows={"a": "model=transformer eval.length=360"})
    config = rows[0].configs[0]
    assert (config.model.kind, config.eval.length, config.train.steps) == ("transformer", 360, 7)
    assert rows[0].overrides == ["size=nano", "train.steps=7", "model=transformer", "eval.length=360"]


def test_without_rows_the_configuration_is_the_row(chosen):
    (row,) = chosen("retrieval.k=2", "name=mine")
    assert (row.name, row.configs[0].retrieval.k) == ("mine", 2)


def test_one_row_by_name(chosen):
    (row,) = chosen("+experiment=table1_pg19", "row=landmark_4096_k4")
    assert row.configs[0].memory.blocks == 80


def test_unknown_row_is_refused_naming_those_there_are(chosen):
    with pytest.raises(UserError, match=r"row=landmark_9: no such row \(one of plain_512, plain_360"):
        chosen("+experiment=table1_pg19", "row=landmark_9")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("eval.length=512", "eval.length"),
        ("model=transformer_xl", "model"),
        ("eval={length:512}", "eval"),
        ("++retrieval.k=2", "retrieval.k"),
    ],
)
def test_row_that_sets_what_the_command_line_sets_is_refused(chosen, override, key):
    with pytest.raises(UserError, match=rf"on the command line, but row (plain|landmark)_512 sets .*{key}"):
        chosen("+experiment=table1_pg19", "size=nano", override)


def test_key_inside_the_group_that_a_row_chooses_is_no_clash(chosen):
    rows = chosen("model.block_size=32", rows={"a": "model=landmark"})
    assert rows[0].configs[0].model.block_size == 32


def test_only_the_chosen_row_can_clash(chosen):
    (row,) = chosen("+experiment=table1_pg19", "retrieval.k=3", "row=plain_512")
    assert row.configs[0].retrieval.k == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=transformr", "row b: .*Could not find 'model/transformr'"),
        ("eval.lenght=3", "row b: .*did you mean 'length'"),
        ("eval.length=abc", "row b: .*could not be converted to Integer"),
        ("retrieval.k=-1", "row b: retrieval.k=-1: must be at least 0"),
        ("eval.length='3", "row b: No closing quotation"),
        ("eval.length", "row b: .*missing EQUAL"),
        ("retrieval.k=1,2", "row b gives retrieval.k several values"),
        ("task=train", "row b sets task, which belongs to the whole experiment"),
        ("logger.mode=offline", "row b sets logger.mode, which belongs"),
    ],
)
def test_every_row_is_checked_before_the_first_is_run(chosen, text, message):
    with pytest.raises(UserError, match=message) as error:
        chosen("size=nano", rows={"a": "model=transformer", "b": text})
    assert "\n" not in str(error.value)


def test_seeds_give_a_row_several_configurations(chosen):
    (row,) = chosen("seeds=[3,4]", rows={"a": "model=transformer"})
    assert [config.seed for config in row.configs] == [3, 4]


def test_seed_beside_seeds_is_refused(chosen):
    with pytest.raises(UserError, match="seed: set on the command line, but seeds is set too"):
        chosen("seeds=[3,4]", "seed=5")


def test_comparison_of_a_row_that_does_not_exist_is_refused(chosen):
    with pytest.raises(UserError, match=r"compare: this: \[a, c\] must be the names of two rows"):
        chosen(rows={"a": "model=transformer"}, compare={"this": ["a", "c"]})
