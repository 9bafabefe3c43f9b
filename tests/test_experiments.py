"""Every experiment, from a corpus to its pictures, with a model too small to learn anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from landmark.cli import main as app
from landmark.config import SYNTHETIC, to_config
from landmark.config.rows import named
from tests.configurations import CONF, compose_conf

EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
TINY = [
    *("size=nano", "tokenizer=bytes", "trainer=cpu", "logger=csv", "train.precision=32-true"),
    *("model.num_layers=2", "model.num_heads=2", "model.head_dim=4", "model.mlp_dim=8"),
    *("train.steps=2", "train.batch_size=1", "train.validate_every=2", "train.validate_batches=1"),
]
TEXT = ["data=stdlib", "data.max_documents=6", "eval.tokens=8192"]
_MANY, _FEW = 60, 9  # of so many rows only the first few
PROMPTS = ["eval.prompts=1", "eval.generated=1"]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Shared, so that experiments that need the same run train it once."""
    return tmp_path_factory.mktemp("experiments")


def overrides(experiment, output):
    if experiment == "finetune_llama":
        return finetuning(output)
    given = [f"+experiment={experiment}", *TINY, f"output={output}"]
    config = to_config(compose_conf(given))
    texts = {name: row.split() for name, row in named(config).items()}
    short = {name: [word for word in row if not word.startswith("train.steps=")] for name, row in texts.items()}
    set_by_rows = {word.partition("=")[0] for row in short.values() for word in row}
    given = [word for word in given if word.partition("=")[0] not in set_by_rows]
    amount = PROMPTS if config.data.name in SYNTHETIC else TEXT
    if config.rows and "eval.task=" in str(config.rows):  # whose prompts are long in bytes
        given = [word.replace("tokenizer=bytes", "tokenizer=code") for word in given]
    few = ["eval.prompts=1"] if config.data.name not in SYNTHETIC else []
    own = ("eval.prompts=", "eval.tokens=")  # long rows say how much they read
    long = [f"~rows.{name}" for name, row in named(config).items() if any(key in row for key in own)]
    kept = [name for name in named(config) if f"~rows.{name}" not in long]
    most = [] if len(kept) < _MANY else [f"~rows.{name}" for name in kept[_FEW:]]
    trained = [f"rows.{name}='{' '.join(short[name])}'" for name in kept if short[name] != texts[name]]
    return [*given, *amount, *few, *long, *most, *trained]


def finetuning(output):
    """Of a tiny Llama with a tokenizer of its own."""
    from tests.huggingface.conftest import make_model, make_tokenizer

    folder = output / "tiny-llama"
    if not folder.exists():
        make_model("llama").save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    tiny = [word for word in TINY if not word.startswith(("tokenizer=", "model."))]
    given = ["+experiment=finetune_llama", *tiny, *TEXT, f"model.name={folder}", "train.length=100"]
    return [*given, f"output={output}"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_runs_from_corpus_to_picture(experiment, output, capsys):
    given = overrides(experiment, output)
    config = to_config(compose_conf(given))
    app.run(config, given, compose_conf)
    said = capsys.readouterr().out
    assert f"of {len(named(config))} rows evaluated now" in said
    assert list((output / "tables" / experiment).glob("*-*.png"))


def test_multirun_ends_with_its_table(output, tmp_path):
    """Jobs fill the records of their cells; the table and its heat map come when all are done."""
    command = ["-m", *overrides("sweep_k_local", output), "retrieval.k=1,2", "eval.local=150,250"]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "run.py"), *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("k1_local150") == done.stdout.count("k2_local250") == 2
    assert done.stdout.count("written: ") == 1
    assert done.stdout.index("written: ") > done.stdout.rindex("[3/3]")
    assert "no record yet" not in done.stdout
