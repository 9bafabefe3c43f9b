"""The source itself: nothing is unpickled, no text is run, and no setting reads the environment."""

import ast
import os
from dataclasses import fields
from pathlib import Path

import pytest

from landmark.cli.sweeps import SubmititSlurm

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "run.py", *sorted(ROOT.glob("landmark/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]
# Calls that may run what they read, and the argument that forbids it.
FORBIDDEN_BY = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
UNPICKLING = ("pickle.load", "pickle.Unpickler", "dill", "cloudpickle", "joblib.load", "shelve", "marshal")
RUNNING = ("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load")
FROM_PRETRAINED = {"landmark/huggingface/safe_loading.py", "landmark/data/tokenizers.py"}


def calls() -> list:
    """(file, name, call) of every call in the source."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.append((str(path.relative_to(ROOT)), ast.unparse(node.func), node))
    return found


def test_nothing_is_unpickled():
    seen = set()
    for file, name, call in calls():
        assert not name.startswith(UNPICKLING), f"{file}:{call.lineno} {name}"
        assert name not in RUNNING, f"{file}:{call.lineno} {name}"
        given = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
        if name in FORBIDDEN_BY:
            seen.add(name)
            argument, safe = FORBIDDEN_BY[name]
            assert given.get(argument) is safe, f"{file}:{call.lineno} {name} without {argument}={safe}"
        for argument, unsafe in (("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False)):
            assert given.get(argument) is not unsafe, f"{file}:{call.lineno} {name}"
        if name.endswith("from_pretrained"):
            assert file in FROM_PRETRAINED, f"{file}:{call.lineno}: open it as landmark.huggingface.safe_loading does"
    assert "torch.load" in seen


@pytest.mark.parametrize("key", [item.name for item in fields(SubmititSlurm) if "str" in str(item.type)])
def test_no_text_becomes_a_line_of_a_script(here, key, monkeypatch):
    """A stand-in for sbatch is not even asked."""
    (here.folder / "sbatch").write_text("#!/bin/bash\ntouch ran\n")
    (here.folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here.folder}:{os.environ['PATH']}")
    sweep = ("-m", "data=stdlib", "tokenizer=bytes", "size=nano", "task=plan", "retrieval.k=1,2")
    (odd := here.folder / "a\ntouch ran").mkdir()
    for words in ([f"hydra.launcher.{key}='a\ntouch ran'"], ["output='a\ntouch ran'"]):
        done = here(*sweep, "hydra/launcher=submitit_slurm", *words)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "must be one line of plain text" in done.err
    monkeypatch.chdir(odd)
    assert "must be one line of plain text" in here(*sweep, "hydra/launcher=submitit_slurm").err
    assert not (here.folder / "ran").exists()
