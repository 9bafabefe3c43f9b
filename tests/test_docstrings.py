"""Public docstrings: a class has one, and so has a function of more than three parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "landmark"
FILES = sorted(PACKAGE.rglob("*.py"))
MOST = 3  # parameters of a function without a docstring
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(tree: ast.Module | ast.ClassDef, name: str = "") -> Iterator[tuple[str, Documented]]:
    """Public functions and classes, and public methods of public classes."""
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield f"{name}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, f"{name}{node.name}.")


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in arguments if each.arg not in ("self", "cls")]


def is_described_elsewhere(node: Documented) -> bool:
    """Overloads, and the hooks that Lightning calls and describes."""
    return node.name.startswith("on_") or any(ast.unparse(each) == "overload" for each in node.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_public_names_are_described(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert path.name == "__main__.py" or ast.get_docstring(tree) or not tree.body
    for name, node in public(tree):
        if isinstance(node, ast.ClassDef) or (len(parameters(node)) > MOST and not is_described_elsewhere(node)):
            assert ast.get_docstring(node), f"{name} has no docstring"
