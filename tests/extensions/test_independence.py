"""An extension can be deleted: the core then still imports, keeps its layers, trains, reads, saves and generates."""

import ast
import pkgutil
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from landmark import extensions
from landmark.utils.errors import UserError
from landmark.utils.extensions import extension_with
from tests.test_layers import PACKAGE, imported

NAMES = [module.name for module in pkgutil.iter_modules(extensions.__path__)]
SETTINGS = {name: import_module(f"landmark.extensions.{name}").SETTINGS for name in NAMES}

# Forks a process for each copy of the package, so that what all of them need is imported once.
PROGRAM = """
import importlib, os, pkgutil, sys, tempfile, traceback
import lightning, numpy, omegaconf, hydra, pytest, torch

def smoke(removed, settings):
    import landmark
    from landmark.utils.errors import UserError
    for module in pkgutil.walk_packages(landmark.__path__, "landmark."):
        if not module.name.endswith("__main__") and not module.name.startswith("landmark.models.huggingface"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                assert error.name and not error.name.startswith("landmark"), error  # an optional package
    from landmark.experiment.config import Config
    from landmark.experiment.config.schema import ModelConfig
    from landmark.experiment.runs.jobs import check
    from landmark.models import Decoder, DecoderConfig, build, load, save
    from landmark.utils.extensions import extension_with
    from landmark.utils.window_batch import WindowBatch
    shape = dict(kind="landmark", num_layers=2, num_heads=2, head_dim=8, mlp_dim=32, block_size=5)
    config = DecoderConfig.from_flat(shape | dict(vocab_size=64, landmark_id=60, cmt=True))
    model, tokens = Decoder(config), torch.randint(0, 50, (2, 23))
    batch = WindowBatch(tokens, tokens, torch.tensor([2, 5]))
    sum(loss for loss, _ in model.window_losses(batch)).backward()
    memory = model.new_memory(k=2, rerank=4, cutoff=0.1)
    model(tokens, memory=memory)
    with tempfile.TemporaryDirectory() as folder:
        memory.save(folder + "/memory")
        save(model, folder)
        again = load(folder)
        loaded = again.new_memory(k=2, rerank=4, cutoff=0.1)
        loaded.load(folder + "/memory")
        assert torch.equal(again(tokens, memory=loaded), model(tokens, memory=memory))
        assert again.generate([[1, 2, 3]], 4) == model.generate([[1, 2, 3]], 4)
    for setting in settings:
        with pytest.raises(UserError, match=setting):
            extension_with(setting)

children = []
for copy in sys.argv[1:]:
    folder, removed, *settings = copy.split(":")
    if (child := os.fork()) == 0:
        sys.path.insert(0, folder)
        try:
            smoke(removed, settings)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append((removed, child))
failed = [removed for removed, child in children if os.waitpid(child, 0)[1]]
sys.exit("without these the core fails: " + ", ".join(failed) if failed else 0)
"""


def test_each_extension_can_be_deleted_from_a_copy(tmp_path):
    copies = []
    for name in NAMES:
        copy = tmp_path / name / "landmark"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        found = copy / "extensions" / name
        shutil.rmtree(found) if found.is_dir() else found.with_suffix(".py").unlink()
        if (conf := PACKAGE.parent / "conf").is_dir():
            (copy.parent / "conf").symlink_to(conf)
        copies.append(":".join([str(copy.parent), name, *SETTINGS[name]]))
        for path in copy.rglob("*.py"):  # nothing that is left imports it, typing included
            assert not any(each.startswith(f"landmark.extensions.{name}") for each in imported(path)), path
    done = subprocess.run([sys.executable, "-c", PROGRAM, *copies], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def files_of_the_core() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if "extensions" not in path.parts[len(PACKAGE.parts) :]]


def test_the_core_names_no_extension_these_import_public_names_only_and_a_setting_is_of_one():
    own = {setting.rpartition(".")[2] for name in NAMES for setting in SETTINGS[name]}
    for path in files_of_the_core():
        text = path.read_text(encoding="utf-8")
        assert not [name for name in NAMES if f"extensions.{name}" in text or f"extensions/{name}" in text], path
        assert own.isdisjoint(n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)), path
    for path in (PACKAGE / "extensions").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("landmark"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path}: {private}"
    every = [setting for name in NAMES for setting in SETTINGS[name]]
    assert sorted(every) == sorted(set(every))
    for name in NAMES:
        for setting in SETTINGS[name]:
            assert extension_with(setting).__name__ == f"landmark.extensions.{name}"
    with pytest.raises(UserError, match="model.colour: there is no such setting"):
        extension_with("model.colour")
