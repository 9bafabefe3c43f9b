"""The command line is Hydra's: each flag and each kind of override that Hydra documents does what it says."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hydra.experimental.callback import Callback

from landmark.cli.tasks import TASKS
from tests.cli.shell import start
from tests.configurations import SMALL

FREE = ("data=stdlib", "tokenizer=bytes", "size=nano", "model=landmark")


@pytest.fixture
def shown(here, monkeypatch):
    """Commands whose task prints the configuration of each job, in JSON."""
    monkeypatch.setitem(TASKS, "plan", lambda command: print(json.dumps(asdict(command.config), default=str)))

    def show(*words):
        done = here(*words, "task=plan")
        assert (done.code, "error: " in done.err) == (0, False), done
        return [json.loads(line) for line in done.out.splitlines() if line.startswith('{"name"')]

    return show


FLAGS = {
    "--cfg job --resolve -p train size=nano": "# @package train\nsteps: 4000\n",
    "-c hydra": "\nhydra:\n  run:\n",
    "-c all": "\ntask: auto\n",
    "--info searchpath": "Config search path",
    "-i defaults": "Defaults List",
    "--info defaults-tree": "<root>:",
    "--info plugins": "Installed Hydra Plugins",
    "--info config": "Config search path",
    "-i": "Installed Hydra Plugins",
    "--help train.steps=7": "\n  steps: 7\n",
    "-h": "  +experiment=table1_pg19 ",
    "--hydra-help": "See https://hydra.cc for more info.",
    "--version": "Hydra 1.",
    "-sc install=bash": "complete -o nospace",
    "-r task=status": "not begun: ",
    "-cn mine -cd conf -c job -p size": "nano\n",
    "--config-path PLACE/conf --config-name mine --cfg job -p size": "nano\n",
}


@pytest.mark.parametrize("typed", FLAGS)
def test_each_flag_does_what_hydra_documents(here, typed):
    (here.folder / "conf").mkdir()
    (here.folder / "conf" / "mine.yaml").write_text("defaults: [config, {override size: nano}, _self_]\n")
    done = here(*typed.replace("PLACE", str(here.folder)).split())
    assert done.code == 0, done
    assert FLAGS[typed] in f"\n{done.out}"


def test_tab_completes_settings(here, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "landmark retrieval.gran")
    monkeypatch.setenv("COMP_POINT", "23")
    assert "retrieval.granularity=" in here("-sc", "query=bash").out


STOPPING = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "validation/loss"}
OVERRIDES = {
    "train.steps=7": ("train.steps", 7),
    "size=paper": ("size", "paper"),
    "+experiment=quickstart": ("name", "quickstart"),
    "+rows.a='size=nano'": ("rows.a", "size=nano"),
    "++train.steps=8": ("train.steps", 8),
    "callbacks=[early_stopping,device_stats] ~callbacks.early_stopping.patience": (
        "callbacks.early_stopping",
        STOPPING,
    ),
    "callbacks=early_stopping ~callbacks.early_stopping.patience=3": ("callbacks.early_stopping", STOPPING),
    "~cmt": ("cmt.enabled", False),
    "seeds=[1,2]": ("seeds", [1, 2]),
    "+rows={a: 'size=nano'}": ("rows.a", "size=nano"),
    "data.path='a, b'": ("data.path", "a, b"),
    "data.path=${output}/x": ("data.path", "outputs/x"),
    "data.path=${oc.env:PLACE}": ("data.path", "here"),
    "data.path=${hydra:job.name}": ("data.path", "landmark"),
    "train.max_lr=float(1)": ("train.max_lr", 1.0),
    "seeds=sort([2,1])": ("seeds", [1, 2]),
}


@pytest.mark.parametrize("word", OVERRIDES)
def test_each_override_does_what_hydra_documents(shown, monkeypatch, word):
    monkeypatch.setenv("PLACE", "here")
    key, expected = OVERRIDES[word]
    fixed = [each for each in FREE if each[:5] not in word and ("model" not in each or "rows" not in word)]
    fixed = fixed if "experiment" not in word else ["size=nano"]
    (config,) = shown(*fixed, *(word.split(" ") if word.startswith("callbacks") else [word]))
    for part in key.split("."):
        config = config[part]
    assert config == expected


SWEPT = {
    "retrieval.k=1,2": [1, 2],
    "retrieval.k=range(1,4)": [1, 2, 3],
    "retrieval.k=sort(2,1)": [1, 2],
    "retrieval.k=tag(mine,choice(3,4))": [3, 4],
    "retrieval.k=int(choice(1.0,2.0))": [1, 2],
}


@pytest.mark.parametrize("word", SWEPT)
def test_each_kind_of_sweep_starts_its_jobs(shown, word):
    multirun = "hydra.mode=MULTIRUN" if "range" in word else "-m"
    assert [config["retrieval"]["k"] for config in shown(multirun, *FREE, word)] == SWEPT[word]


def test_a_sweep_may_stand_in_a_file(shown):
    Path("conf").mkdir()
    settings = "hydra: {mode: MULTIRUN, sweeper: {params: {retrieval.k: '5,6'}}}"
    Path("conf", "mine.yaml").write_text(f"defaults: [config, _self_]\n{settings}\n")
    assert [config["retrieval"]["k"] for config in shown("-cd", "conf", "-cn", "mine", "-m", *FREE)] == [5, 6]


def test_a_job_has_a_folder_with_its_settings_and_its_log_where_hydra_is_told(here, monkeypatch):
    monkeypatch.setitem(TASKS, "prepare", lambda command: print(os.environ["MINE"], Path.cwd()))
    words = ("task=prepare", *FREE, "hydra.run.dir=kept", "+hydra.job.env_set.MINE=set", "hydra.job.chdir=true")
    assert here(*words, "hydra.verbose=true").out.splitlines()[-1] == f"set {here.folder}/kept"
    assert "size: nano" in (here.folder / "kept" / ".hydra" / "config.yaml").read_text()
    monkeypatch.setenv("MINE", "own")
    assert here("task=prepare", *FREE, "hydra.output_subdir=null", "hydra/job_logging=disabled").code == 0
    (folder,) = (here.folder / "outputs").glob("*/*")
    assert list(folder.iterdir()) == []
    names = ("hydra.sweep.dir=all", "hydra.sweep.subdir=${hydra.job.override_dirname}")
    assert here("-m", "task=prepare", *FREE, *names, "seed=1,2").code == 0
    assert {path.name for path in (here.folder / "all").glob("seed=*")} == {"seed=1", "seed=2"}


class Noting(Callback):
    """A callback of one's own."""

    seen: list[str] = []  # noqa: RUF012

    def on_job_end(self, config, job_return, **_):
        self.seen.append(job_return.status.name)


def test_a_callback_of_ones_own_sees_jobs_and_a_run_is_done_again(here, monkeypatch):
    monkeypatch.setitem(TASKS, "prepare", lambda command: print("prepared", command.config.size, len(command.rows)))
    own = ["+hydra.callbacks.mine._target_=tests.cli.test_hydra.Noting"]
    own += ["+hydra.callbacks.kept._target_=hydra.experimental.callbacks.PickleJobInfoCallback", "hydra.run.dir=kept"]
    assert here("task=prepare", "+experiment=quickstart", "size=nano", *own).code == 0
    assert Noting.seen == ["COMPLETED"]
    again = here("--experimental-rerun", "kept/.hydra/config.pickle")
    assert (again.code, again.out.splitlines()[-1]) == (0, "prepared nano 6"), again


def test_a_key_without_effect_on_one_job_is_reported_and_the_others_go_on(here, monkeypatch):
    monkeypatch.setitem(TASKS, "plan", lambda command: print("planned", command.config.model.kind))
    words = ("-m", *FREE[:3], "model=transformer,landmark", "task=plan")
    done = here(*words, "model.block_size=25")
    assert (done.code, [line for line in done.out.splitlines() if "planned" in line]) == (
        0,
        ["planned transformer", "planned landmark"],
    )
    assert done.out.count("model.block_size has no effect on model=transformer") == 1
    assert "has no effect on model=transformer, landmark" in here(*words, "model.cache=25").err


NAMED = ["-m", "data=documents", "data.path=books", "tokenizer=bytes", "size=nano", *SMALL, "eval.tokens=4096"]


def test_sweeps_of_lists_mappings_and_a_named_run_name_their_rows(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book of blocks, read in order " * 3000)
    words = [*NAMED, "model=landmark", "eval.length=1024", "eval.local=250"]
    done = start(tmp_path, *words, "seeds=[0,1],[2]", "retrieval={k:1},{k:2}")
    assert done.code == 0, done.err
    rows = re.findall(r"^(\S+) +\d", done.out[done.out.index("\nsweep: ") :], re.MULTILINE)
    assert rows == ["seeds0-1_k-1", "seeds0-1_k-2", "seeds2_k-1", "seeds2_k-2"]
    again = start(tmp_path, "-m", "run=latest", "retrieval.k=1,2", "eval.length=1024", "eval.local=250", "logger=csv")
    assert again.code == 0, again
    assert re.findall(r"^(\S+) +\d", again.out[again.out.index("\nsweep: ") :], re.MULTILINE) == ["k1", "k2"]


def test_optuna_proposes_settings(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a book of blocks, read in order " * 3000)
    words = [*NAMED, "model=landmark", "eval.length=1024", "eval.local=range(100,250)", "hydra/sweeper=optuna"]
    done = start(
        tmp_path, *words, "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "train.max_lr=interval(1e-3,1e-2)"
    )
    assert done.code == 0, done.err
    (best,) = tmp_path.glob("outputs/multirun/*/*/optimization_results.yaml")
    assert set(re.findall(r"^  (\S+):", best.read_text(), re.MULTILINE)) == {"eval.local", "train.max_lr"}
    assert len(list((tmp_path / "outputs" / "records" / "rows").iterdir())) == 3
    assert "\nsweep: " in done.out
