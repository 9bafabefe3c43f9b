"""Imports point one way: what each folder of the package may import."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "landmark"

# What each folder (or file) may import of the package besides itself and `utils`.
ALLOWED = {
    "utils": set(),
    "attention": set(),
    "memory": {"attention"},
    "blocks": {"attention", "memory"},
    "gguf": set(),
    "huggingface": {"attention", "memory", "blocks", "gguf"},
    "answering": {"blocks", "documents", "huggingface"},
    "models": {"answering", "attention", "memory", "huggingface", "gguf", "config"},
    "serving": {"answering", "documents", "huggingface"},
    "config": {"memory", "blocks"},
    "documents": set(),
    "data": {"config", "documents", "gguf"},
    "training": {"models", "data", "config"},
    "evaluation": {"answering", "attention", "blocks", "memory", "models", "data", "documents", "config", "loading"},
    "inspector": {"memory", "models", "data", "evaluation", "config"},
    "tracking": {"data", "config"},
    "experiment": {"memory", "blocks", "models", "data", "training", "evaluation", "tracking", "config"},
    "results": {"config"},
    "cli": {
        *("answering", "data", "documents", "evaluation", "inspector", "experiment", "results", "tracking", "config"),
        "huggingface",
    },
    "loading": {"models", "data", "config"},
    "__main__": {"cli"},
    "__init__": {"attention", "memory", "loading"},
}


@functools.cache
def imported(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too, and those that only the type checker sees."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(layer: str) -> list[Path]:
    return [*PACKAGE.glob(f"{layer}.py"), *sorted((PACKAGE / layer).rglob("*.py"))]


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_those_below_it(layer):
    """Types count too: a name that only the type checker sees still ties two folders together."""
    allowed = ALLOWED[layer] | {layer, "utils"}
    for path in files(layer):
        for name in imported(path):
            if name != "landmark.__version__" and (name == "landmark" or name.startswith("landmark.")):
                assert [*name.split("."), ""][1] in allowed, f"{path.relative_to(PACKAGE.parent)} imports {name}"


def test_every_layer_is_named_in_no_circle_and_every_import_written_as_one():
    """`import_module` would be an arrow that no test sees: only `utils.trust` and lazy exports may use it."""
    lazy = {f"{folder}__init__.py" for folder in ("", "evaluation/", "memory/", "models/")}
    allowed = {"utils/trust.py", "memory/select/faiss.py", *lazy}
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"experiments", "benchmarks", "tests", "run"}, path
        if "import_module" in path.read_text(encoding="utf-8"):
            assert str(path.relative_to(PACKAGE)) in allowed
    TopologicalSorter(ALLOWED).prepare()  # raises CycleError
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == set(ALLOWED)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_no_modules_of_a_folder_import_each_other(folder):
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files(folder)}

    def used(path: Path) -> set[str]:
        found = [f"{name}." for name in imported(path)]
        return {module for module in modules if any(name.startswith(f"{module}.") for name in found)}

    TopologicalSorter({module: used(path) for module, path in modules.items()}).prepare()  # raises CycleError


def loaded(*statements: str) -> list[set[str]]:
    """Top-level packages that are loaded after each statement, in a process of its own."""
    show = "; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    code = "\n".join(["import sys", *(statement + show for statement in statements)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_program_starts_without_torch_and_attention_and_models_load_nothing_heavier():
    start, program, check = loaded(
        "import landmark.cli.main",
        "import landmark.results.render, landmark.data, landmark.tracking.tracker, landmark.utils.significance",
        "import landmark.models; landmark.models.DecoderConfig; from landmark.experiment import jobs; jobs.check",
    )
    assert "numpy" not in start
    assert not program & {*["torch", "lightning", "datasets", "tiktoken", "wandb", "pandas", "altair", "vl_convert"]}
    assert "torch" not in check
    names = ", ".join(f"landmark.models.{name}" for name in ("checkpoint", "config", "language_model"))
    attention, models = loaded("import landmark.attention", f"import {names}")
    assert "torch" in attention
    assert not attention & {"lightning", "hydra", "datasets", "wandb", "matplotlib"}
    assert not models & {"hydra", "omegaconf"}
