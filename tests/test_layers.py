"""Imports point one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "landmark"

# What each layer may import of the package, besides itself, `EVERYWHERE`.
ALLOWED = {
    "attention": set(),
    "memory": {"attention"},
    "huggingface": {"attention", "memory"},
    "models": {"attention", "memory", "huggingface"},
    "data": set(),
    "retriever": {"attention", "memory", "models", "data", "huggingface"},
    "training": {"attention", "memory", "models", "data", "config", "lab"},
    "evaluation": {"attention", "memory", "models", "data", "retriever", "config", "lab"},
    "inspector": {"attention", "memory", "models", "data", "evaluation", "config", "lab"},
    "config": set(),
    "lab": {"config"},
    "errors": set(),
    "extensions": set(),
}
EVERYWHERE = {"landmark.errors", "landmark.extensions", "landmark.lab.files"}


def imported(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too; not what only the type checker sees."""
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_those_below_it(layer):
    files = [*PACKAGE.glob(f"{layer}.py"), *sorted((PACKAGE / layer).rglob("*.py"))]
    assert files
    allowed = ALLOWED[layer] | {layer}
    for path in files:
        for name in imported(path):
            if not name.startswith("landmark.") or any(name.startswith(common) for common in EVERYWHERE):
                continue
            assert name.split(".")[1] in allowed, f"{path.relative_to(PACKAGE.parent)} imports {name}"


def test_every_layer_is_named():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "app", "endings", "execution", "launchers", "overview", "processes"} <= set(ALLOWED)


def test_the_package_does_not_import_the_experiments():
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] == "experiments" for name in imported(path)), path


def loaded(statement: str) -> set[str]:
    """Top-level packages that a statement loads, in a process of its own."""
    code = f"import sys; {statement}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_attention_loads_torch_and_nothing_heavier():
    packages = loaded("import landmark.attention")
    assert "torch" in packages
    assert not packages & {"lightning", "hydra", "datasets", "wandb", "matplotlib"}


def test_rows_are_compared_without_torch():
    assert "torch" not in loaded("import landmark.evaluation.statistics")


def test_the_program_starts_without_torch():
    packages = loaded("import landmark.app, landmark.lab.render, landmark.data, landmark.lab.wandb")
    assert not packages & {"torch", "lightning", "datasets", "wandb", "matplotlib"}
