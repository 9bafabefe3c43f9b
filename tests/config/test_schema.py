import json
from dataclasses import replace

import pytest

from landmark.config import to_config
from landmark.config.rows import named, select
from landmark.config.saved import trained_with, write_launch
from landmark.config.schema import value_of
from tests.configurations import CONF

EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
SIZES = ["paper", "small", "nano"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_row_of_every_experiment_composes_at_every_size(composer, experiment, size):
    """All rows of the smallest size, the first and the last of the others."""
    overrides = [f"+experiment={experiment}", f"size={size}"]
    config = to_config(composer(overrides))
    assert config.name == experiment
    names = list(named(config))
    if size == "nano":
        rows = select(config, overrides, composer)
        assert [row.name for row in rows] == names
    else:
        of_each = [[*overrides, f"row={name}"] for name in {names[0], names[-1]}]
        rows = [row for words in of_each for row in select(to_config(composer(words)), words, composer)]
    assert {row.configs[0].size for row in rows} == {size}


def test_a_table_has_a_folder_for_its_results_and_table1_the_papers_rows(configure):
    books, papers = (configure(f"+experiment=table1_{data}").rows for data in ("pg19", "arxiv"))
    assert len(books) == 13
    assert papers == {name: row for name, row in books.items() if not name.startswith("xl")}
    folders = {folder.name for folder in (CONF.parent / "experiments").iterdir() if folder.is_dir()}
    assert set(EXPERIMENTS) - {"quickstart", "survival"} == folders
    assert (CONF.parent / "benchmarks" / "survival").is_dir()  # whose table is there to be killed


@pytest.mark.parametrize("size", SIZES)
def test_transformer_xl_reads_as_many_tokens_as_the_others(configure, size):
    plain = configure("model=transformer", f"size={size}").train
    xl = configure("model=transformer_xl", f"size={size}").train
    assert (xl.length, plain.length) == (2048, 512)
    assert xl.steps * xl.batch_size * xl.length == plain.steps * plain.batch_size * plain.length


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("model=landmark", "steps=240000 batch_size=128 length=512 precision=bf16-mixed eval.split=validation"),
        ("model=transformer_xl", "steps=60000"),
        ("+experiment=quickstart model=transformer_xl", "length=2048 eval.split=test"),
        (
            "+experiment=table1_pg19 size=small model=transformer_xl",
            "size=small steps=6000 batch_size=32 eval.split=test",
        ),
        ("+experiment=quickstart model=transformer_xl train.steps=7 eval.tokens=9000", "steps=7 eval.tokens=9000"),
        ("data=arxiv_math", "eval.tokens=4000000"),
        ("data=arxiv_math size=small", "eval.tokens=1000000 eval.split=test"),
        ("data=arxiv_math size=nano", "eval.tokens=250000"),
        ("output=elsewhere", "data.cache=elsewhere/data"),
        *((f"model={each} model.name=x", "tokenizer.name=pretrained") for each in ("pretrained", "pretrained_base")),
        ("model=pretrained_landmark model.name=x", "tokenizer.name=pretrained"),
        ("model=pretrained model.name=x tokenizer=bytes", "tokenizer.name=bytes"),
    ],
)
def test_sizes_are_the_papers_and_what_is_given_later_wins(configure, overrides, expected):
    """The paper's recipe; the size that an experiment gives, or that comes after it; the command line. Names without a
    group are of `train`."""
    config = configure(*overrides.split())
    for key, _, value in (word.partition("=") for word in expected.split()):
        of_train = key in ("steps", "batch_size", "length", "precision")
        assert str(value_of(config, f"train.{key}" if of_train else key)) == value


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_configuration_survives_the_folder_of_a_run(configure, experiment, tmp_path):
    config = configure(f"+experiment={experiment}", "seeds=[0,1]")
    write_launch(tmp_path, config)
    assert trained_with(tmp_path) == replace(config, rows={}, parts={}, panels={}, compare={}, next_commands={})
    assert "generate" not in json.loads((tmp_path / "launch.json").read_text())["config"]  # nothing of it was set


@pytest.mark.parametrize("experiment", ["quickstart", "table1_pg19"])
def test_a_trial_is_short_and_lies_apart(composer, experiment):
    overrides = [f"+experiment={experiment}", "+debug=limit"]
    rows = select(to_config(composer(overrides)), overrides, composer)
    for config in (row.configs[0] for row in rows):
        assert (config.output, config.data.cache) == ("outputs/debug", "outputs/debug/data")
        assert config.train.steps == 20
        assert (config.eval.tokens, config.logger.service) == (8192, "csv")
