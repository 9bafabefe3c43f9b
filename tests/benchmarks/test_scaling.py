"""benchmarks/scaling.md has the FLOPs of task=plan."""

import re
import shlex
from types import SimpleNamespace

import pytest

from benchmarks import scaling
from landmark.cli import main as app
from landmark.config import to_config
from landmark.experiment.inputs import Inputs
from landmark.utils.flops import PEAK_BF16_FLOPS
from tests.configurations import compose_conf

EXPERIMENT = "table1_pg19"


@pytest.fixture(scope="module")
def page():
    return scaling.PATH.read_text(encoding="utf-8")


def cells(page, name):
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_command_writes(page, monkeypatch):
    """Of one experiment, for all of them take a while to compose."""
    monkeypatch.setattr(scaling, "EXPERIMENTS", (EXPERIMENT,))
    written, there = scaling.report().splitlines(), page.splitlines()
    assert {line for line in written if "**all" not in line} <= set(there)
    assert [line for line in written if line[:2] != "| "] == [line for line in there if line[:2] != "| "]


def test_flops_are_those_of_task_plan(page, monkeypatch, capsys, tmp_path):
    """Of the corpus nothing is known, so that task=plan counts the training alone."""
    monkeypatch.setattr(Inputs, "tokenizer", lambda *_: SimpleNamespace(vocab_size=50304, hash="", name="gpt2"))
    monkeypatch.setattr(Inputs, "prepared_corpus", lambda *_: None)
    overrides = [f"+experiment={EXPERIMENT}", "task=plan", f"output={tmp_path}"]
    app.run(to_config(compose_conf(overrides)), overrides, compose_conf)
    said = capsys.readouterr().out
    planned = re.search(r"missing: (\d+) runs, (\d+) rows, (\S+) FLOPs", said)
    assert planned
    _, runs, flops, evaluations, *_ = cells(page, EXPERIMENT)
    assert (runs, evaluations, f"{float(flops):.1e}") == planned.groups()
    for kind, found in re.findall(r"^run (transformer|landmark|transformer_xl)-\S+ .* (\S+e\+\S+) ", said, re.M):
        steps = "60K" if kind == "transformer_xl" else "240K"
        assert f"{float(cells(page, f'{kind}, pg19, {steps} steps')[3]):.1e}" == found


def test_hours_are_flops_over_what_gpus_reach(page):
    peak = PEAK_BF16_FLOPS["H100"]
    kinds = {"transformer": "240K", "landmark": "240K", "transformer_xl": "60K"}
    flops = [float(cells(page, f"{kind}, pg19, {steps} steps")[3]) for kind, steps in kinds.items()]
    hours = [float(cell) for cell in cells(page, EXPERIMENT)[-6:]]
    for (one, four, many), utilisation in zip((hours[:3], hours[3:]), (0.2, 0.4)):
        assert one == pytest.approx(sum(flops) / (utilisation * peak) / 3600, abs=0.3)
        assert four == pytest.approx(one / 4, abs=0.06)
        assert many == pytest.approx(max(flops) / (8 * utilisation * peak) / 3600, abs=0.06)


def test_runs_take_turns_on_the_nodes():
    jobs = [SimpleNamespace(flops=flops * 3600 * scaling.PEAK) for flops in (1, 4, 2, 3, 2)]
    assert scaling.Cluster(1, 1).hours(jobs, 1.0) == pytest.approx(12)
    assert scaling.Cluster(2, 1).hours(jobs, 0.5) == pytest.approx(12)
    assert scaling.Cluster(4, 2).hours(jobs, 1.0) == pytest.approx(2)


def test_measured_utilisation_takes_the_place_of_the_assumed(tmp_path, monkeypatch):
    records = [
        {"labels": {"size": size}, "results": {"mfu": mfu}}
        for size, mfu in (("paper", 0.3), ("paper", 0.35), ("paper", 0.5), ("small", 0.1), ("paper", None))
    ]
    monkeypatch.setattr(scaling.Records, "all", lambda *_: records)
    assert scaling.utilisations(tmp_path) == {"35% MFU, measured": 0.35}
    assert list(scaling.utilisations(None).values()) == [0.2, 0.4]


def test_commands_compose(page):
    (first, second) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    for line in (first + second).replace("\\\n", " ").splitlines():
        python, program, *words = shlex.split(line)
        assert (python, program) == ("python", "run.py")
        config = to_config(compose_conf([word.partition(",")[0] for word in words if word != "-m"]))
        assert config.name == EXPERIMENT
        assert config.row is None or config.row in config.rows
