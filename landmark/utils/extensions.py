"""What one file adds to the package: a corpus (docs/add_a_corpus.md), a model (docs/add_a_model.md)."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from landmark.utils.errors import UserError


def named(package: str, name: str, attribute: str, key: str) -> Any:
    """The `attribute` of a package's module `name`. Raises UserError, naming the setting `key`, where there is none."""
    spec = find_spec(f"{package}.{name}") if name.isidentifier() else None
    found = None if spec is None else getattr(import_module(spec.name), attribute, None)
    if found is None:
        raise UserError(f"{key}={name}: there is no {package.replace('.', '/')}/{name}.py that has a {attribute}")
    return found
