"""task=status: what is done, running, stopped or missing; and task=plan: what the rest costs."""

import json
import os
import re
from dataclasses import replace

import pytest

from landmark.experiment.config import Config, to_config
from landmark.experiment.config.saved import trained_with, write_launch
from landmark.experiment.runs.jobs import find_run, with_settings_of_run
from landmark.experiment.runs.plan import GPU, Machine, describe, row_cost, run_cost
from landmark.utils.checkpoints import checkpoint_path, hash_path
from landmark.utils.errors import UserError
from landmark.utils.files import write_json
from tests.configurations import compose_conf
from tests.forked import hold

QUICK = ("+experiment=quickstart", "data=pg19")
FIRST = "quickstart (nano, pg19, bytes, eval.tokens=8192): "


def state(said, what):
    """State and note of a run or a row."""
    return re.search(rf"^  {what}\S*  +(\w+) *(.*)$", said, re.MULTILINE).groups()


def status(work, capsys, *words):
    capsys.readouterr()
    if words:
        work(*words, "task=status")
    else:
        work.task("task=status", f"output={work.output}")
    return capsys.readouterr().out


def test_of_an_experiment_each_run_and_row(work, capsys):
    assert status(work, capsys, *QUICK).startswith(f"{FIRST}8 missing\n")
    assert not work.output.exists()
    work(*QUICK, "row=plain_512")
    before = {path: path.stat().st_mtime_ns for path in work.output.rglob("*") if path.is_file()}
    said = status(work, capsys, *QUICK)
    assert said.startswith(f"{FIRST}2 done, 6 missing\n")
    assert state(said, "row plain_512") == ("done", "")
    assert state(said, "row last_blocks_2048") == ("missing", "")
    assert state(said, "run transformer-pg19-nano-") == ("done", "")
    assert {path: path.stat().st_mtime_ns for path in work.output.rglob("*") if path.is_file()} == before
    assert status(work, capsys, *QUICK, "row=plain_512").startswith(f"{FIRST}2 done\n")  # the arrow up, and a task
    free = ("model=landmark", "retrieval.k=2", "name=mine")
    work(*free)
    said = status(work, capsys, *free)
    assert said.startswith("mine (nano, pg19, bytes, eval.tokens=8192, ")
    assert said.splitlines()[0].endswith(": 2 done")


def test_of_an_output_folder_what_is_done_by_experiment(work, capsys):
    work(*QUICK, "row=plain_512")
    work("+experiment=table2_granularity", "row=per_head_2048_k2", "seeds=[0,1]")
    work("+experiment=table1_pg19", "row=landmark_2048_k4", "seeds=[0]")
    work("+experiment=table2_granularity", "row=per_token_and_head_2048_k4", "seeds=[0]")
    assert len(work.evaluated) == 0, "a row serves every experiment that has it"
    work("model=landmark", "retrieval.k=7")
    said = status(work, capsys)
    assert "quickstart (nano, pg19, bytes): 1 row done, the last by '" in said
    assert "table2_granularity (nano, pg19, bytes): 2 rows done, " in said
    assert "single (nano, pg19, bytes): 1 row done, " in said
    assert "not begun: ablation_retrieval, " in said
    assert "quickstart, " not in said.splitlines()[-1]


@pytest.mark.parametrize("words", [QUICK, ()])
def test_a_run_at_work_is_running_and_a_killed_one_has_stopped(work, capsys, words):
    work(*QUICK, "row=plain_512", "train.steps=3000")
    (run,), (row,) = ([*(work.output / "records" / kind).iterdir()] for kind in ("runs", "rows"))
    run.unlink()
    if not words:
        row.unlink()
    given = [*words, "train.steps=3000"] if words else []
    process = hold(work.output, "runs", run.stem)
    try:
        assert state(status(work, capsys, *given), "run transformer-pg19-nano-") == ("running", "step 190 of 3,000")
    finally:
        process.kill()
        process.join()
    told = "no checkpoint yet, step 0 of 3,000"
    assert state(status(work, capsys, *given), "run transformer-pg19-nano-") == ("stopped", told)
    (folder,) = work.output.glob("runs/*")
    whole, cut = (checkpoint_path(folder / "checkpoints", step) for step in (192, 200))
    whole.parent.mkdir()
    for path in (whole, hash_path(whole), cut):  # the last one was being written
        path.touch()
    said = status(work, capsys, *given)
    assert state(said, "run transformer-pg19-nano-") == ("stopped", "step 192 of 3,000")
    if words:
        capsys.readouterr()
        work(*given, "row=plain_512", "task=plan")
        assert re.search(r"^run transformer-\S+ +step 192 of 3,000 ", capsys.readouterr().out, re.M)
    assert ("quickstart: no row is done\n  run transformer" in said) == (not words)


# ---- rows and runs that another process makes


@pytest.mark.parametrize("kind", ["rows", "runs"])
def test_what_another_process_makes_waits_for_all_that_it_does_not(work, kind):
    """A row, or the run of all rows but one, until `plain_512` is evaluated."""
    given = ("+experiment=quickstart", "data=pg19", "task=evaluate")
    work(*given)
    rows = list(work.evaluated)
    names = {file: json.loads(file.read_text())["labels"]["row"] for file in (work.output / "records/rows").iterdir()}
    record = next(file for file, name in names.items() if name == "twice_landmarks")
    if kind == "runs":
        folder = json.loads(record.read_text())["labels"]["run"]
        (record,) = (work.output / "records/runs").glob(f"{folder[-10:]}.json")
    for file in [*names, record]:
        file.unlink(missing_ok=True)
    other, evaluate = hold(work.output, kind, record.stem), work.evaluate

    def kill_at_plain(job, inputs):
        if job.name == "plain_512":
            other.kill()
            other.join()
        return evaluate(job, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("landmark.experiment.runs.runner.evaluate_row", kill_at_plain)
        work(*given)
    waiting = ["twice_landmarks"] if kind == "rows" else [row for row in rows if row != "plain_512"]
    rows = [row for row in rows if row not in waiting]
    then = rows.index("plain_512") + 1
    assert work.evaluated == [*rows[:then], *waiting, *rows[then:]]


# ---- `run=latest`, a name or a folder; and the settings that a run's folder knows


@pytest.fixture
def output(tmp_path):
    """Three trained runs, of which the second is the newest, and one in training."""
    ages = {"landmark-stdlib-nano-aaa": 30, "landmark-stdlib-nano-bbb": 10, "transformer-pg19-nano-ccc": 20}
    for name, age in ages.items():
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


def test_the_latest_run_of_inspect_is_one_that_has_blocks(output):
    os.utime(output / "runs" / "transformer-pg19-nano-ccc" / "config.json", (2e9, 2e9))  # as after quickstart
    for task, name in (("generate", "transformer-pg19-nano-ccc"), ("inspect", "landmark-stdlib-nano-bbb")):
        config = Config(task=task, run="latest", output=str(output))
        assert with_settings_of_run(config, []).run == str(output / "runs" / name)


def test_the_settings_of_a_run_need_not_be_typed_but_for_those_of_reading_it(output):
    words = ["size=nano", "tokenizer=bytes", "data=stdlib", "train.steps=7", "cmt=on", "positions=jumps"]
    reading = ["cmt.cutoff=0.3", "positions.mapping=true", "model.backend=reference"]
    trained = to_config(compose_conf([*words, *reading]))
    write_launch(output / "runs" / "landmark-stdlib-nano-bbb", trained)

    def asked(*words):
        words = [f"output={output}", "prompt=a", *words]
        return with_settings_of_run(to_config(compose_conf(words)), words)

    read = asked("task=generate", "run=latest")
    assert (read.size, read.tokenizer, read.train) == (trained.size, trained.tokenizer, trained.train)
    assert read.model == replace(trained.model, backend="auto")
    assert (read.data.name, read.eval.tokens) == ("stdlib", trained.eval.tokens)
    assert (read.cmt.enabled, read.cmt.cutoff) == (True, 0.0)
    assert (read.positions.p_jump, read.positions.mapping) == (100, "stingy")
    given = ["tokenizer=gpt2", "model.backend=reference", "eval.tokens=5", "cmt.cutoff=0.5", "positions.mapping=true"]
    own = asked("task=generate", "run=latest", *given)
    assert (own.tokenizer.name, own.model.backend, own.eval.tokens) == ("gpt2", "reference", 5)
    assert (own.model.num_layers, own.cmt.enabled) == (trained.model.num_layers, True)
    assert (own.cmt.cutoff, own.positions.mapping) == (0.5, "true")
    again = asked("+experiment=table1_pg19", "task=inspect", "run=latest")  # the last command, and a task
    assert (again.rows, again.model) == ({}, read.model)
    assert asked("task=generate", "run=aaa").size == "paper"  # an early run's folder does not say


@pytest.mark.parametrize(("key", "config"), [("model.fan_out", {"model": {"fan_out": 3}}), ("team", {"team": 3})])
def test_a_run_of_a_setting_that_was_removed_is_refused_in_one_line(tmp_path, key, config):
    write_json(tmp_path / "launch.json", {"config": config})
    with pytest.raises(UserError, match=rf"launch\.json: {key}=3: there is no such setting; .*tried.md") as error:
        trained_with(tmp_path)
    assert "\n" not in str(error.value)


# ---- task=plan: costs

VOCABULARY = 50304


def test_parameters_are_the_papers_and_training_costs_six_flops_for_each_and_attention_that_sees_a_cache(configure):
    assert run_cost("a", configure(), VOCABULARY, False).parameters == (202_531_840, 151_020_544)
    assert run_cost("a", configure("cmt=on"), VOCABULARY, False).parameters == (202_531_840 + 1024, 151_020_544 + 1024)
    shared = 12 * 2 * 1024 * 6 * 128  # keys and values of two heads in place of eight
    assert run_cost("a", configure("model.num_kv_heads=2"), VOCABULARY, False).parameters[1] == 151_020_544 - shared
    config = configure("model=transformer")
    job = run_cost("a", config, VOCABULARY, False)
    rest = run_cost("a", config, VOCABULARY, False, begun=config.train.steps // 4)
    assert (rest.tokens, rest.flops, rest.passes) == (0.75 * job.tokens, 0.75 * job.flops, 0.75 * job.passes)
    assert job.tokens == 240_000 * 128 * 512
    assert job.flops / job.tokens == pytest.approx(6 * 202_531_840 + 12 * 12 * 1024 * 256.5)
    # Segments of 2048 in windows of 256: only the first window has no cache.
    costs = [run_cost("a", configure(f"model={m}"), VOCABULARY, False) for m in ("transformer", "transformer_xl")]
    plain, xl = (cost.flops / cost.tokens for cost in costs)
    assert xl - plain == pytest.approx(12 * 12 * 1024 * (128.5 + 256 * 7 / 8 - 256.5))


def test_models_of_transformers_are_counted(configure, tmp_path):
    """By their own configuration, without weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    words = ["model=pretrained_landmark", f"model.name={tmp_path}"]
    total = sum(parameter.numel() for parameter in model.parameters())
    cost = run_cost("a", configure(*words), 320, False)
    assert cost.parameters == (total, total - 2 * 320 * 16)
    assert cost.flops / cost.tokens == pytest.approx(6 * total + 12 * 2 * 16 * 256.5)


@pytest.mark.parametrize("asked", ["eval.task=vt", "eval.task=copy", "data=passkey"])
def test_prompts_and_probes_are_counted_whatever_the_budget(configure, asked):
    plain = configure("model=transformer", "size=nano", asked, "eval.prompts=7", "eval.length=600", "eval.tokens=8192")
    assert row_cost("a", plain, 320, False, 3_000_000).tokens == 7 * 600
    landmark = row_cost("a", configure("size=nano"), 320, False, 3_000_000)
    assert landmark.tokens == 250_000 * 51 / 50  # the budget, and landmarks
    assert row_cost("a", configure("model=transformer"), VOCABULARY, False, 3_000_000).tokens == 3_000_000


def record(kind, hardware, rate=1000.0):
    return {
        "labels": {"size": "nano"},
        "settings": {"model": {"kind": kind}},
        "results": {"tokens_per_second": rate, "flops_per_token": 2e6},
        "provenance": {"hardware": hardware},
    }


def test_speed_is_that_of_earlier_runs_on_like_hardware(configure):
    job = run_cost("a", configure("size=nano", "model=transformer"), 320, False)
    runs = [
        record("transformer", {"cores": 2}),
        record("transformer", {"cores": 2}, 3000.0),
        record("transformer", {"cores": 64}, 1e6),
        record("landmark", {"cores": 2}, 1e6),
        record("transformer", {"cores": 2, "gpus": ["H100"]}, 5e6),
    ]
    assert Machine(2, 0, runs).speed(job) == (2000.0 * 2e6, "measured, 2 runs")
    assert Machine(2, 1, runs).speed(job) == (5e6 * 2e6, "measured, 1 run")
    assert Machine(2, 2, runs).speed(job)[0] == 2 * GPU
    assert "assumed" in Machine(3, 0, runs).speed(job)[1]


def test_the_hours_of_a_plan_add_up(configure):
    """Each is rounded up as it is shown, and the total is the sum of what is shown."""
    config = configure("size=nano", "model=transformer")
    costs = [row_cost(f"row{number}", config, 320, False, 250_000) for number in range(7)]
    lines = describe(costs, Machine(2, 0, [])).splitlines()
    shown = [int(re.search(r"(\d+) s  ", line)[1]) for line in lines[1:8]]  # pyright: ignore
    assert len(set(shown)) == 1
    assert 0 < shown[0] < 60
    assert f"about {sum(shown)} s here" in lines[-3]
    years = describe([run_cost("run", configure(), VOCABULARY, False)], Machine(2, 0, []))
    assert re.search(r"about \d{1,3}(,\d{3})+ h here", years), "no tenth of an hour"
