"""Commands that would run code, leave a file that a later Python runs, or tell a secret. Each ends in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from landmark.cli import safety
from landmark.config import to_config
from landmark.utils.errors import UserError
from tests.cli.test_safety import composed
from tests.configurations import compose_conf

RUN = Path(__file__).parents[2] / "run.py"
SIZE = ["data=stdlib", "tokenizer=bytes", "size=nano", "task=plan", "model=landmark", "trainer=cpu"]
FORMAT = "hydra.job_logging.formatters.simple.format"
ATTACKS = {
    "the environment, by interpolation": (
        ["hydra.job.env_set=${next_commands}", "+next_commands.GIT_CONFIG_COUNT='1'"],
        "hydra.job.env_set.GIT_CONFIG_COUNT=1: set variables of the environment in the shell",
    ),
    "a handler, by interpolation": (
        ["hydra.job_logging.handlers.console=${next_commands}", "+next_commands.class=subprocess.Popen"],
        "hydra.job_logging.handlers.console.class=subprocess.Popen: a log goes to",
    ),
    "a log file that Python runs": (
        [
            "+hydra.job_logging.handlers.mine={class: logging.FileHandler, filename: outputs/mine.pth}",
            "hydra.job_logging.root.handlers=[mine]",
            f"{FORMAT}='import os; os.system(\"touch ran\")'",
        ],
        "hydra.job_logging.handlers.mine.filename=outputs/mine.pth: a log file is named *.log, and lies below output=",
    ),
    "a secret in a name": (
        ["name=${oc.env:SECRET}"],
        "name=${oc.env:SECRET}: names more than another setting: write the value out, or let the shell fill it in",
    ),
    "a pickle": (["--experimental-rerun=mine.pickle"], "a pickled configuration is not read"),
}


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *arguments]
    environment = os.environ | {"SECRET": "hunter2"} | variables
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_one_line(tmp_path, attack):
    arguments, said = ATTACKS[attack]
    done = start(tmp_path, *SIZE, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stdout + done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


SLURM = "hydra/launcher=submitit_slurm"


@pytest.mark.parametrize(
    "overrides",
    [
        ("hydra.job.env_copy=[PATH]",),
        ("hydra.job.env_copy=[NOT_SET]",),
        (SLURM, "hydra.launcher.setup=['touch ran']"),
        (SLURM, "hydra.launcher.submitit_folder=elsewhere"),
        ("hydra/launcher=joblib", "hydra.launcher.pre_dispatch='1+1'"),
        ("+hydra.launcher.python=evil",),
        ("hydra.callbacks=${next_commands}", "+next_commands._target_=os.system"),
        ("+hydra.callbacks.second=${hydra.callbacks.table}",),
        ("hydra.launcher=${next_commands}", "+next_commands._target_=os.system"),
        ("hydra.job_logging=${next_commands}", "+next_commands.class=os.system"),
        ("hydra.job_logging.root.level=cfg://handlers.console.stream",),
        ("+hydra.job_logging.formatters.simple.style='{'",),
        ("+hydra.job_logging.filters.mine.class=os.system",),
        ("+hydra.job_logging.handlers.x={class: logging.FileHandler, filename: outputs/../x.log}",),
        ("+hydra.job_logging.handlers.x={class: logging.FileHandler, filename: /etc/x.log}",),
        ("hydra.run.dir=${oc.env:SECRET}",),
        ("data.path='${.${size}}'",),
        ("data.path='\\\\\\\\${oc.env:SECRET}'",),
    ],
)
def test_more_of_the_kind(overrides):
    safety.guard()
    for launcher in ("submitit", "joblib"):
        if any(launcher in word for word in overrides):
            pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    with pytest.raises(UserError, match=r"^[\w.]+=?.*: "):
        safety.check(composed(*overrides))


@pytest.mark.parametrize("where", ["command line", "file"])
def test_a_search_path_imports_nothing(tmp_path, where):
    (tmp_path / "proof.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    arguments = ["hydra.searchpath=[pkg://proof]"]
    if where == "file":
        arguments = ["--config-dir", str(tmp_path / "conf"), "--config-name", "mine"]
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "mine.yaml").write_text("hydra:\n  searchpath: ['pkg://proof']\n")
    done = start(tmp_path, *arguments, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 2
    assert "hydra.searchpath: name the folder with --config-dir" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ("hydra/job_logging=default",),
        ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.nodes=2"),
        ("hydra/launcher=joblib", "hydra.launcher.n_jobs=4"),
        ("hydra.sweep.dir=outputs/${now:%Y-%m-%d}", "hydra.sweep.subdir=${hydra.job.num}"),
        ("hydra.verbose=[landmark]",),
        ("+hydra.job_logging.handlers.x={class: logging.FileHandler, filename: '${output}/run.log'}",),
        ("data.path=${output}/books", "prompt='5 \\${}'"),
    ],
)
def test_known_settings_are_allowed(overrides):
    for launcher in ("submitit", "joblib"):
        if any(launcher in word for word in overrides):
            pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    safety.check(composed(*overrides))


def test_a_row_reads_no_variable_of_the_environment(monkeypatch):
    """Values of rows are set on a configuration that is composed already."""
    safety.guard()
    monkeypatch.setenv("SECRET", "hunter2")
    composed = compose_conf([])
    OmegaConf.update(composed, "data.path", "${oc.env:SECRET}", merge=True)
    with pytest.raises(UserError, match="Unsupported interpolation type"):
        to_config(composed)
