"""The core stays small where it has once grown: parameters, fields, lines of a function, settings without others."""

import ast
import inspect
import re
from dataclasses import fields

from landmark.attention import landmark_attention
from landmark.memory import Memory
from landmark.models.config import DecoderConfig
from tests.test_layers import PACKAGE

FOLDERS = ("attention", "memory", "models", "config", "data", "training", "evaluation", "experiment", "huggingface")


def core():
    """The files of the package, as text, by their path in it."""
    return {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


def test_parameters_and_fields_are_few():
    assert len(inspect.signature(landmark_attention).parameters) <= 9
    assert len(inspect.signature(Memory).parameters) <= 10
    assert len(fields(DecoderConfig)) <= 14


def test_functions_have_at_most_sixty_lines_and_the_steps_of_a_memory_thirty():
    """Docstrings and signatures do not count, nor do Triton's kernels."""
    long = {}
    for path, text in core().items():
        if path.parts[0] not in FOLDERS or path.parts[:2] == ("attention", "fused") or "_kernels" in path.name:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                lines = node.end_lineno - first.lineno + 1
                is_step = path.parts == ("memory", "memory.py") and node.name != "__init__"
                if lines > (30 if is_step else 60):
                    long[f"{path}:{node.name}"] = lines
    assert not long


def test_few_settings_exclude_each_other():
    """Two variants that cannot go together are two classes for the same seam."""
    said = re.compile(r"goes without|go without|leave out|not together|exclude each other", re.IGNORECASE)
    found = [
        f"{path}: {ast.unparse(node)[:100]}"
        for path, text in core().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Raise) and said.search(ast.unparse(node))
    ]
    assert len(found) <= 8, "\n".join(found)
