import json
from dataclasses import replace

import pytest

from landmark.config import to_config
from landmark.config.rows import named, select
from landmark.config.saved import trained_with, write_launch
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


def test_a_table_has_a_folder_for_its_results():
    folders = {folder.name for folder in (CONF.parent / "experiments").iterdir() if folder.is_dir()}
    assert set(EXPERIMENTS) - {"quickstart", "survival"} == folders
    assert (CONF.parent / "benchmarks" / "survival").is_dir()  # whose table is there to be killed


def test_table1_has_thirteen_rows_and_eleven_of_them_on_arxiv_math(configure):
    books, papers = (configure(f"+experiment=table1_{data}").rows for data in ("pg19", "arxiv"))
    assert len(books) == 13
    assert papers == {name: row for name, row in books.items() if not name.startswith("xl")}


@pytest.mark.parametrize("size", SIZES)
def test_transformer_xl_reads_as_many_tokens_as_the_others(configure, size):
    plain = configure("model=transformer", f"size={size}").train
    xl = configure("model=transformer_xl", f"size={size}").train
    assert (xl.length, plain.length) == (2048, 512)
    assert xl.steps * xl.batch_size * xl.length == plain.steps * plain.batch_size * plain.length


def test_paper_size_is_the_papers(configure):
    train = configure("model=landmark").train
    assert (train.steps, train.batch_size, train.length, train.precision) == (240_000, 128, 512, "bf16-mixed")
    assert configure("model=transformer_xl").train.steps == 60_000


def test_size_given_by_an_experiment_or_after_it_decides_the_recipe(configure):
    assert configure("+experiment=quickstart", "model=transformer_xl").train.length == 2048
    small = configure("+experiment=table1_pg19", "size=small", "model=transformer_xl")
    assert (small.size, small.train.steps, small.train.batch_size) == ("small", 6000, 32)


def test_command_line_wins_over_size_recipe_and_experiment(configure):
    config = configure("+experiment=quickstart", "model=transformer_xl", "train.steps=7", "eval.tokens=9000")
    assert (config.train.steps, config.eval.tokens) == (7, 9000)


def test_split_is_validation_at_paper_size_and_test_below(configure):
    assert [configure(f"size={size}").eval.split for size in SIZES] == ["validation", "test", "test"]


def test_arxiv_math_is_evaluated_on_a_part_of_its_split(configure):
    budgets = [configure("data=arxiv_math", f"size={size}").eval.tokens for size in SIZES]
    assert budgets == [4_000_000, *(configure(f"size={size}").eval.tokens for size in SIZES[1:])]


def test_data_cache_lies_below_the_output(configure):
    assert configure("output=elsewhere").data.cache == "elsewhere/data"


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


@pytest.mark.parametrize("model", ["pretrained", "pretrained_base", "pretrained_landmark"])
def test_a_model_of_transformers_brings_its_tokenizer(composer, model):
    given = [f"model={model}", "model.name=some-folder"]
    assert composer(given).tokenizer.name == "pretrained"
    assert composer([*given, "tokenizer=bytes"]).tokenizer.name == "bytes"
