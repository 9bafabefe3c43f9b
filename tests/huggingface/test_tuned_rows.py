"""Rows that read the model of transformers that another row trains further."""

import json
from pathlib import Path

import pytest
import torch

from landmark.cli import main as app
from landmark.config import to_config
from landmark.experiment.jobs import Inputs
from landmark.experiment.runner import load_trained
from landmark.utils.errors import UserError
from tests.configurations import compose_conf
from tests.huggingface.conftest import save_model
from tests.workplace import run_task

ROWS = {
    "training": "model=pretrained_base model.as_is=false model.lora_rank=2",
    "tuned": "model=pretrained start=training",
    "tuned-dense": "model=pretrained_base start=training",
    "plain": "model=pretrained",
}
SETTINGS = [
    *("size=nano", "data=stdlib", "data.max_documents=6", "tokenizer=pretrained", "trainer=cpu", "logger=csv"),
    *("train.steps=2", "train.batch_size=2", "train.length=64", "train.precision=32-true", "train.validate_batches=1"),
    *("train.max_lr=0.01", "train.start_lr=0.01", "eval.tokens=512", "eval.length=256", "eval.local=64"),
]
LISTED = f"+rows={{{', '.join(f'{name}: {text!r}' for name, text in ROWS.items())}}}"


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """A function that runs a command with a tiny Llama, and gives the records of its rows by their names."""
    output = tmp_path_factory.mktemp("tuned")
    save_model(output / "tiny")

    def run(*words, name=output / "tiny"):
        given = [*SETTINGS, f"output={output}", f"model.name={name}", *words]
        run_task(*given)
        rows = [json.loads(path.read_text()) for path in (output / "records" / "rows").glob("*.json")]
        return output, {row["labels"]["row"]: row for row in rows}

    return run


def test_a_row_reads_what_another_trains(launch, capsys):
    output, rows = launch(LISTED, "row=tuned")
    (trained,) = (output / "runs").iterdir()
    assert "train.steps" not in capsys.readouterr().err
    assert rows["tuned"]["labels"]["run"] == str(trained)
    before = (trained / "model.safetensors").stat().st_mtime_ns
    _, rows = launch(LISTED)
    assert [path.name for path in (output / "runs").iterdir()] == [trained.name]
    assert (trained / "model.safetensors").stat().st_mtime_ns == before
    nll = {name: row["results"]["nll"] for name, row in rows.items()}
    assert nll["training"] == nll["tuned-dense"]
    assert len({row["id"] for row in rows.values()}) == 4
    assert abs(nll["tuned"] - nll["plain"]) > 1e-3
    _, rows = launch("model=pretrained", "name=folder", name=trained)
    assert rows["folder"]["results"]["nll"] == nll["tuned"]
    assert rows["folder"]["id"] != rows["tuned"]["id"]


def test_the_training_is_one_run_of_a_plan_and_of_task_train(launch, capsys):
    launch(LISTED, "task=train")
    said = capsys.readouterr().out
    assert said.count("trained before") == 1
    with pytest.raises(UserError, match="task=train: single trains nothing"):
        launch("model=pretrained", "task=train")
    launch(LISTED, "row=tuned", "train.steps=3", "task=plan")
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in said if line[:1] == ["run"]] == ["missing"]
    assert [line[2] for line in said if line[:2] == ["row", "tuned"]] == ["missing"]


def test_the_batches_of_the_training_are_those_that_devices_share(launch):
    training = "model=pretrained_base model.as_is=false train.batch_size=2"
    rows = f"+rows={{training: {training!r}, tuned: 'model=pretrained start=training'}}"
    shared = [word for word in SETTINGS if not word.startswith("train.batch_size")]
    given = [*shared, "row=tuned", "train.steps=9", "trainer.devices=4", rows]
    output, _ = launch(LISTED, "row=tuned")
    given += [f"output={output}", f"model.name={output / 'tiny'}"]
    config = to_config(compose_conf(given))
    assert config.train.batch_size % 4 == 0
    with pytest.raises(UserError, match=r"batch_size=2 cannot be shared evenly by 4 devices: set trainer\.devices"):
        app.run(config, given, compose_conf)


def test_a_trained_model_is_read_in_the_type_that_is_named(launch):
    output, rows = launch(LISTED, "row=training")
    whole = rows["training"]
    launch(LISTED, "row=training", "model.dtype=bfloat16")
    records = [json.loads(path.read_text()) for path in (output / "records" / "rows").glob("*.json")]
    (halves,) = (record for record in records if record["settings"].get("dtype") == "bfloat16")
    assert halves["settings"] == whole["settings"] | {"dtype": "bfloat16"}
    assert 0 < abs(halves["results"]["nll"] - whole["results"]["nll"]) < 0.05
    config = to_config(compose_conf([*SETTINGS, "model=pretrained_base", f"model.name={output / 'tiny'}"]))
    for dtype in (None, "bfloat16"):
        config.model.as_is, config.model.dtype = False, dtype
        model, _ = load_trained(config, Path(whole["labels"]["run"]), Inputs())
        assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype or "float32")}
