"""`run=latest`, a name or a folder; and the settings that a run's folder knows."""

import os

import pytest

from landmark.config import to_config
from landmark.config.saved import trained_with, write_launch
from landmark.experiment.jobs import find_run, with_settings_of_run
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json
from tests.configurations import compose_conf


@pytest.fixture
def output(tmp_path):
    """Three trained runs, of which the second is the newest, and one in training."""
    for age, name in (
        (30, "landmark-stdlib-nano-aaa"),
        (10, "landmark-stdlib-nano-bbb"),
        (20, "transformer-pg19-nano-ccc"),
    ):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
        (folder / "config.json").write_text(f'{{"kind": "{name.partition("-")[0]}"}}')
        os.utime(folder / "config.json", (1e9 - age, 1e9 - age))
    (tmp_path / "runs" / "landmark-stdlib-nano-ddd").mkdir()
    return tmp_path


def test_a_run_is_named_or_those_that_are_there(output, monkeypatch, tmp_path_factory):
    runs = output / "runs"
    assert find_run("latest", output) == runs / "landmark-stdlib-nano-bbb"
    assert find_run("latest", output, kind="transformer") == runs / "transformer-pg19-nano-ccc"
    for name in ("transformer-pg19-nano-ccc", "ccc"):
        assert find_run(name, output) == runs / "transformer-pg19-nano-ccc"
    assert find_run(str(runs / "landmark-stdlib-nano-aaa"), "elsewhere") == runs / "landmark-stdlib-nano-aaa"
    monkeypatch.chdir(runs)
    assert find_run("landmark-stdlib-nano-aaa", "elsewhere").resolve() == runs / "landmark-stdlib-nano-aaa"
    with pytest.raises(UserError, match="run=latest: .*runs has no trained run"):
        find_run("latest", tmp_path_factory.mktemp("none"))
    with pytest.raises(UserError, match="run=zzz: no such run, .*runs has landmark-stdlib-nano-aaa, "):
        find_run("zzz", output)
    (output / "runs" / "transformer-pg19-nano-eaaa").mkdir()
    with pytest.raises(UserError, match="run=aaa: is the end of several runs, .* has landmark-.*-aaa, transf.*-eaaa"):
        find_run("aaa", output)


def test_the_settings_of_a_run_need_not_be_typed(output):
    words = ["size=nano", "tokenizer=bytes", "data=stdlib", "model=landmark", "train.steps=7"]
    trained = to_config(compose_conf(words))
    write_launch(output / "runs" / "landmark-stdlib-nano-bbb", trained)

    def asked(*words):
        words = [f"output={output}", *words]
        return with_settings_of_run(to_config(compose_conf(words)), words)

    read = asked("task=generate", "prompt=a", "run=latest")
    for each in ("size", "tokenizer", "model", "train"):
        assert getattr(read, each) == getattr(trained, each)
    assert read.data.name == "stdlib"
    assert read.eval.tokens == trained.eval.tokens
    own = asked("task=generate", "prompt=a", "run=latest", "tokenizer=gpt2", "model.backend=reference", "eval.tokens=5")
    assert (own.tokenizer.name, own.model.backend, own.eval.tokens) == ("gpt2", "reference", 5)
    assert own.model.num_layers == trained.model.num_layers
    again = asked("+experiment=table1_pg19", "task=inspect", "prompt=a", "run=latest")  # the last command, and a task
    assert (again.rows, again.model) == ({}, trained.model)
    assert asked("task=generate", "prompt=a", "run=aaa").size == "paper"  # an early run's folder does not say


def test_how_a_run_is_read_is_not_that_of_the_row_that_trained_it(output):
    words = ["size=nano", "data=stdlib", "cmt=on", "positions=jumps", "model.backend=reference"]
    reading = ["cmt.cutoff=0.3", "positions.mapping=true"]
    write_launch(output / "runs" / "landmark-stdlib-nano-bbb", to_config(compose_conf([*words, *reading])))

    def asked(*words):
        words = [f"output={output}", "task=generate", "prompt=a", "run=latest", *words]
        return with_settings_of_run(to_config(compose_conf(words)), words)

    plain = asked()
    assert (plain.cmt.enabled, plain.positions.p_jump) == (True, 100)  # the training's
    assert plain.cmt.cutoff == 0.0
    assert (plain.positions.mapping, plain.model.backend) == ("stingy", "auto")
    own = asked("cmt.cutoff=0.5", "positions.mapping=true")
    assert (own.cmt.enabled, own.cmt.cutoff, own.positions.mapping) == (True, 0.5, "true")


@pytest.mark.parametrize(("group", "name"), [("model", "block_ends"), ("retrieval", "query_window"), (None, "team")])
def test_a_run_of_a_setting_that_was_removed_is_refused_in_one_line(output, group, name):
    folder = output / "runs" / "landmark-stdlib-nano-bbb"
    write_launch(folder, to_config(compose_conf(["size=nano"])))
    launch = read_json(folder / "launch.json")
    launch["config"].setdefault(group, {}) if group else None
    (launch["config"][group] if group else launch["config"])[name] = 3
    write_json(folder / "launch.json", launch)
    key = f"{group}.{name}" if group else name
    with pytest.raises(UserError, match=rf"launch\.json: {key}=3: there is no such setting; .*tried.md") as error:
        trained_with(folder)
    assert "\n" not in str(error.value)
