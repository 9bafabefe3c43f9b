"""wandb_sweep.yaml, carried out by W&B's own agent, without its server."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from landmark.config import to_config
from landmark.utils.files import read_json
from tests.cli.test_launchers import TINY
from tests.configurations import compose_conf

ROOT = Path(__file__).parents[2]
PATH = ROOT / "experiments" / "sweep_k_local" / "wandb_sweep.yaml"


@pytest.fixture
def sweep():
    return yaml.safe_load(PATH.read_text(encoding="utf-8"))


def test_its_runs_are_the_cells_of_the_grid(sweep):
    """The same overrides, so that the rows of agents fill the experiment's table."""
    config = to_config(compose_conf(["+experiment=sweep_k_local"]))
    assert {key: parameter["values"] for key, parameter in sweep["parameters"].items()} == config.grid
    words = [word for word in sweep["command"] if not word.startswith("${")]
    assert words == [
        f"name={config.name}",
        f"eval.length={config.eval.length}",
        f"memory.blocks={config.memory.blocks}",
    ]


def test_an_agent_runs_one_of_them(sweep, tmp_path, monkeypatch):
    from wandb.wandb_agent import Agent

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s4f0")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets
        monkeypatch.setenv(name, "")
    agent = Agent(api=None, queue=None)
    tiny = [word for word in TINY if not word.startswith(("+experiment=", "logger="))]
    chosen = ["data=stdlib", "tokenizer=bytes", "size=nano", f"output={tmp_path}"]
    agent._sweep_command = [*sweep["command"][:-1], *chosen, *tiny, sweep["command"][-1]]
    arguments = {"retrieval.k": {"value": 4}, "eval.local": {"value": 250}}
    agent._command_run({"run_id": "r4n1", "program": sweep["program"], "args": arguments})
    assert agent._run_processes["r4n1"].wait() == 0
    (path,) = (tmp_path / "records" / "rows").iterdir()
    record = read_json(path)
    assert (record["settings"]["k"], record["settings"]["local"], record["settings"]["eval_length"]) == (4, 250, 2048)
    assert sweep["metric"]["name"] in record["results"]
    logged = {folder.name.rpartition("-")[2] for folder in (tmp_path / "wandb").glob("offline-run-*")}
    assert logged == {"r4n1"}
