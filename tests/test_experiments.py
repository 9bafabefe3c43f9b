"""Every experiment, from a corpus to its pictures, with a model too small to learn anything."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from landmark.cli import main as app
from landmark.experiment.config import SYNTHETIC, to_config
from landmark.experiment.config.rows import named, spread
from tests.configurations import CONF, compose_conf
from tests.forked import python

EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
TINY = [
    *("size=nano", "tokenizer=bytes", "trainer=cpu", "logger=csv", "train.precision=32-true"),
    *("model.num_layers=2", "model.num_heads=2", "model.head_dim=4", "model.mlp_dim=8"),
    *("train.steps=2", "train.batch_size=1", "train.validate_every=2", "train.validate_batches=1"),
]
TEXT = ["data=stdlib", "data.max_documents=6", "eval.tokens=8192"]
OWN = ("eval.prompts=", "eval.tokens=", "train.steps=")  # which long rows say themselves
_MOST, _LONGEST = 8, 4096


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Shared, so that experiments that need the same run train it once."""
    return tmp_path_factory.mktemp("experiments")


def few_rows(config):
    """Of the first entries a short row each, and the rows that these start from."""
    texts = named(config)
    lengths = {name: [int(size) for size in re.findall(r"eval\.length=(\d+)", text)] for name, text in texts.items()}
    own = {name for name, text in texts.items() if any(f" {key}" in f" {text}" for key in OWN[:2])}
    short = [name for name in texts if name not in own and max(lengths[name], default=0) <= _LONGEST]
    entries = [spread(name, given, config.parts) for name, given in config.rows.items()]
    chosen = [next((name for name in short if name in entry), None) for entry in entries]
    chosen = [name for name in chosen if name][:_MOST]
    starts = {start for name in chosen for start in re.findall(r"\bstart=(\S+)", texts[name])}
    return {name: texts[name] for name in texts if name in chosen or name in starts}


def compose_few(overrides):
    """The configuration with a few rows only, each trained for as long as the command line says."""
    composed = compose_conf(overrides)
    rows = few_rows(to_config(composed))
    OmegaConf.set_struct(composed, False)
    composed.rows = {
        name: " ".join(word for word in text.split() if not word.startswith("train.steps=")).replace("${", r"\${")
        for name, text in rows.items()
    }
    composed.parts = {}
    composed.compare = {title: pair for title, pair in composed.compare.items() if set(pair) <= rows.keys()}
    return composed


def overrides(experiment, output):
    if experiment in ("table1_pretrained", "equal_keys") or experiment.startswith("pretrained_"):
        return of_transformers(experiment, output)
    given = [f"+experiment={experiment}", *TINY, f"output={output}"]
    config = to_config(compose_few(given))
    given = _free(given, config)
    if "eval.task=" in str(config.rows):  # whose prompts are long in bytes
        given = [word.replace("tokenizer=bytes", "tokenizer=code") for word in given]
    amount = ["eval.generated=1"] if config.data.name in SYNTHETIC else TEXT
    return [*given, *amount, "eval.prompts=1"]


def _free(given, config):
    """Those overrides that no row of the configuration has."""
    set_by_rows = {word.partition("=")[0] for text in config.rows.values() for word in text.split()}
    return [word for word in given if word.partition("=")[0] not in set_by_rows]


def of_transformers(experiment, output):
    """With a tiny Llama and a tokenizer of its own."""
    from tests.models.huggingface.conftest import save_model

    folder = output / "tiny-llama"
    if not folder.exists():
        save_model(folder)
    tiny = [word for word in TINY if not word.startswith(("tokenizer=", "model."))]
    given = [f"+experiment={experiment}", *tiny, f"model.name={folder}", f"output={output}"]
    if experiment == "table1_pretrained":
        return [*given, *TEXT, "train.length=100"]
    if experiment == "equal_keys":
        given += ["eval.length=2048"]
    amount = {"pretrained_passkey": ["eval.generated=1"], "pretrained_tuned": TEXT[:2]}.get(experiment, TEXT)
    given = _free([*given, *amount, "eval.prompts=1"], to_config(compose_few([*given, *amount])))
    if experiment == "pretrained_taught":
        given += ["seeds=[0,1]"]
        taught = [*given, "task=teach", "row=gates_512", "teach.steps=2", "teach.length=128"]
        if not (output / "landmarks-0.safetensors").exists():
            app.run(to_config(compose_few(taught)), taught, compose_few)
        files = [output / f"landmarks-{seed}.safetensors" for seed in (0, 1)]
        assert files[0].read_bytes() != files[1].read_bytes()
    return given


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_runs_from_corpus_to_picture(experiment, output, capsys):
    given = overrides(experiment, output)
    config = to_config(compose_few(given))
    app.run(config, given, compose_few)
    said = capsys.readouterr().out
    assert f"of {len(named(config)) * len(config.seeds or [0])} rows evaluated now" in said
    assert list((output / "tables" / experiment).glob("*-*.png"))


def test_multirun_ends_with_its_table(output, tmp_path):
    """Jobs fill the records of their rows; the table and its picture come when all are done."""
    command = ["-m", *overrides("sweep_k_local", output), "row=k1_local150,k2_local250"]
    done = python(str(Path(__file__).parents[1] / "run.py"), *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("k1_local150", "k2_local250"):
        assert done.stdout.count(name) >= 3  # as a job, a row, and in the table
    assert done.stdout.count("written: ") == 1
    assert done.stdout.index("written: ") > done.stdout.rindex("[1/1]")
