"""Rows of an experiment, from the command line and its file; what goes together, and what is filled in."""

import json
from dataclasses import replace

import pytest

from landmark.experiment.config import to_config
from landmark.experiment.config.checks import resolve
from landmark.experiment.config.rows import Composer, named, select, spread
from landmark.experiment.config.saved import from_saved, trained_with, write_launch
from landmark.experiment.config.schema import value_of
from landmark.experiment.runs.jobs import check
from landmark.utils.errors import UserError
from tests.configurations import CONF, compose_conf


@pytest.fixture
def chosen(composer):
    def choose(*overrides, rows=None, compare=None):
        config = to_config(composer([override for override in overrides if "=1," not in override]))
        if rows is not None:
            config = replace(config, rows=rows, compare=compare or {})
        return select(config, list(overrides), composer, check)

    return choose


def test_row_is_the_command_line_and_its_own_overrides_and_braces_give_one_for_every_combination(chosen):
    (row,) = chosen("seeds=[3,4]", rows={"a": "model=transformer"})
    assert [config.seed for config in row.configs] == [3, 4]
    for of_all, rows in ([["retrieval.k=${seed}"], None], [[], {"a": "model=landmark retrieval.k=${seed}"}]):
        (row,) = chosen("seeds=[3,4]", *of_all, rows=rows)
        assert [config.retrieval.k for config in row.configs] == [3, 4]
    rows = chosen("size=nano", "train.steps=7", rows={"a": "model=transformer eval.length=360"})
    config = rows[0].configs[0]
    assert (config.model.kind, config.eval.length, config.train.steps) == ("transformer", 360, 7)
    assert rows[0].overrides == ["size=nano", "train.steps=7", "model=transformer", "eval.length=360"]
    rows = chosen(rows={"plain": "model=transformer", "k{retrieval.k=1,2}_local{eval.local=150,250}": ""})
    assert [row.name for row in rows] == ["plain", "k1_local150", "k1_local250", "k2_local150", "k2_local250"]
    config = rows[-1].configs[0]
    assert (config.retrieval.k, config.eval.local) == (2, 250)


@pytest.mark.parametrize(
    ("overrides", "rows", "expected"),
    [
        (["retrieval.k=2", "name=mine"], None, {"retrieval.k": 2}),  # the configuration itself
        (["+experiment=table1_pg19", "row=landmark_4096_k4"], None, {"memory.blocks": 80}),
        (["model.block_size=32"], {"a": "model=landmark"}, {"model.block_size": 32}),  # in the group that it chooses
        (["+experiment=table1_pg19", "retrieval.k=3", "row=plain_512"], None, {"retrieval.k": 3}),  # no other can clash
        (["+experiment=sweep_k_local", "row=k8_local350"], None, {"retrieval.k": 8, "eval.local": 350}),
    ],
)
def test_one_row_is_chosen(chosen, overrides, rows, expected):
    (row,) = chosen(*overrides, rows=rows)
    assert {key: value_of(row.configs[0], key) for key in expected} == expected
    assert row.name == {"name=mine": "mine", "model.block_size=32": "a"}.get(overrides[-1], row.name)


def test_a_setting_that_has_an_effect_on_another_row_is_reported_and_a_fault_of_a_row_said_once(chosen, caplog):
    chosen("model.cache=128", rows={"a": "model=landmark", "b": "model=transformer_xl"})
    assert caplog.text == ""
    chosen("+experiment=table1_pg19", "row=plain_512", "model.block_size=25")
    assert "row plain_512: model.block_size has no effect on model=transformer" in caplog.text
    with pytest.raises(UserError) as error:
        chosen(rows={"a": "retrieval.k=-1"})
    assert str(error.value).count("must be at least 0") == 1


def test_a_part_without_braces_is_refused():
    parts = {"twice": "retrieval.k=64"}
    with pytest.raises(UserError, match="twice_2048: twice names a part: to add its overrides write {twice}_2048"):
        spread("twice_2048", "", parts)
    assert spread("{twice}_2048", "", parts) == {"twice_2048": "retrieval.k=64"}
    assert spread("twice_2048", "eval.length=2048", parts) == {"twice_2048": "eval.length=2048"}


def test_a_row_starts_from_the_run_of_another_and_a_model_that_is_not_trained_reads_it(composer):
    overrides = ["+experiment=figure3_finetune", "size=nano", "tokenizer=bytes", "seeds=[3,4]"]
    rows = {row.name: row for row in select(to_config(composer(overrides)), overrides, composer, check)}
    for one in rows["finetuned_512"].configs:
        base = from_saved(one.start_run)
        assert (base.model.kind, one.model.kind, base.seed) == ("transformer", "landmark", one.seed)
        assert base.train.steps != one.train.steps
    assert all(one.start_run is None for one in rows["base_512"].configs)
    given = ["+experiment=pretrained_tuned", "size=nano", "model.name=DIR"]
    config = to_config(composer(given))
    rows = {row.name: row.configs[0] for row in select(config, given, composer, check)}
    for name in ("passkey-tuned_4096", "passkey-tuned-dense_4096"):
        base = from_saved(rows[name].start_run)
        assert (base.model.as_is, base.model.lora_rank, rows[name].model.as_is) == (False, 16, True)
    assert rows["passkey-blocks_4096"].start_run is None


@pytest.mark.parametrize("experiment", ["figure6_positional_jumps", "table1_pretrained"])
def test_rows_are_those_that_hydra_composes(experiment):
    shared = [f"+experiment={experiment}", "size=nano", "tokenizer=gpt2_1024", "train.steps=7"]
    composer = Composer(compose_conf)
    texts = named(to_config(composer(shared)))
    for text in list(texts.values())[:: len(texts) - 1]:
        overrides = [*shared, *text.split()]
        assert composer(overrides) == compose_conf(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"model={model}", "data.repeats=[1]"] for model in ("transformer", "landmark", "transformer_xl")),
        *([f"data.repeats={shares}"] for shares in ("[0]", "[0.5]", "[1,1,0.5,0.5,0.2]", "null")),
        ["model=transformer", "data.repeats=[1]", "train.length=15"],  # room for a repeat at any start
        ["model.block_size=3", "data.repeats=[1]", "train.length=20"],  # beginning with a landmark
        ["size=nano", "eval.task=copy", "eval.length=8192"],  # a probe reads no spans and may be longer
        ["model=transformer", "eval.local=360", "memory.window=148"],
        ["model=transformer", "memory.blocks=3"],  # settings of another model do not matter
        ["retrieval.k=0"],
    ],
)
def test_what_goes_together_is_accepted(configure, overrides):
    check(configure(*overrides))


@pytest.mark.parametrize(
    ("overrides", "local"),
    [
        (["model=transformer", "eval.length=512"], 512),
        (["model=transformer", "eval.length=2048", "memory.window=256"], 256),
        (["model=landmark", "eval.length=2048"], 250),
        (["model=transformer_xl", "eval.length=2048"], 256),
    ],
)
def test_what_is_fed_at_a_time_if_left_open(configure, overrides, local):
    assert resolve(configure(*overrides)).eval.local == local


# ---- every experiment composes, at every size


EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
SIZES = ["paper", "small", "nano"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_row_of_every_experiment_composes_at_every_size(composer, experiment):
    """All rows of the smallest size, the first one of `paper` and the last one of `small`."""
    overrides = [f"+experiment={experiment}", "size=nano"]
    config = to_config(composer(overrides))
    assert config.name == experiment
    names = list(named(config))
    assert [row.name for row in select(config, overrides, composer)] == names
    for size, name in (("paper", names[0]), ("small", names[-1])):
        words = [overrides[0], f"size={size}", f"row={name}"]
        assert [row.configs[0].size for row in select(to_config(composer(words)), words, composer)] == [size]


def test_a_table_has_a_folder_for_its_results_and_table1_the_papers_rows(configure):
    books, papers = (configure(f"+experiment=table1_{data}").rows for data in ("pg19", "arxiv"))
    assert len(books) == 13
    assert papers == {name: row for name, row in books.items() if not name.startswith("xl")}
    folders = {folder.name for folder in (CONF.parent / "experiments").iterdir() if folder.is_dir()}
    assert set(EXPERIMENTS) - {"quickstart"} | {"sources", "answers"} == folders  # which have questions, not rows


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
        ("+experiment=table1_pg19 size=small model=transformer_xl", "size=small steps=6000 batch_size=32"),
        ("+experiment=quickstart model=transformer_xl train.steps=7 eval.tokens=9000", "steps=7 eval.tokens=9000"),
        ("data=arxiv_math", "eval.tokens=4000000"),
        ("data=arxiv_math size=small", "eval.tokens=1000000 eval.split=test"),
        ("output=elsewhere", "data.cache=elsewhere/data"),
        *((f"model={each} model.name=x", "tokenizer.name=pretrained") for each in ("pretrained", "pretrained_base")),
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
    assert trained_with(tmp_path) == replace(config, rows={}, parts={}, panels={}, compare={})
    assert "generate" not in json.loads((tmp_path / "launch.json").read_text())["config"]  # nothing of it was set


@pytest.mark.parametrize("experiment", ["quickstart", "table1_pg19"])
def test_a_trial_is_short_and_lies_apart(composer, experiment):
    overrides = [f"+experiment={experiment}", "+debug=limit"]
    rows = select(to_config(composer(overrides)), overrides, composer)
    for config in (row.configs[0] for row in rows):
        assert (config.output, config.data.cache) == ("outputs/debug", "outputs/debug/data")
        assert config.train.steps == 20
        assert config.trial
        assert (config.eval.tokens, config.logger.service) == (8192, "csv")
