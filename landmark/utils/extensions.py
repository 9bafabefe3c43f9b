"""Extensions: those of the package (`landmark.extensions`), and one's own, each a file. Loads no torch.

This is the only import of a higher folder: by name, and only of a file whose setting is set (docs/architecture.md).
A corpus of one's own is docs/add_a_corpus.md, a model docs/add_a_model.md.

An extension of the package declares the settings of the model that it reads, fields of the schema with
`extension=True`. It may have these functions:

- `check(config)`: raises UserError where settings do not fit it.
- `resolved(config)`: the configuration with settings filled in that null stands for.
- `row_settings(config)`: a part of a row's identity.
- `window_data(config, tokenizer)`: changes batches of windows, in training by `for_step(batch, seed, step, indices)`,
  in validation by `for_validation(batch, windows)`.
- `keys_per_query(length)`: mean number of keys that a query attends to in a window or text of so many tokens.
- `evaluate(model, stream, tokenizer, config, progress)`: in place of perplexity.
"""

import hashlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError
from landmark.utils.trust import check_module


def load_extension(package: str, name: str, attribute: str, key: str) -> Any:
    """Load an attribute of an extension's module, in `package` if its name has no dot. key: setting that gives `name`.
    Raises UserError if there is none, and for one outside that nobody has named who may (`landmark.utils.trust`).
    """
    found = getattr(import_module(find_extension(package, name, attribute, key)), attribute, None)
    if found is None:
        raise _missing(package, name, attribute, key)
    return found


def find_extension(package: str, name: str, attribute: str, key: str) -> str:
    """The whole name of the module that `load_extension` would load. Raises UserError where there is none."""
    check_module(name, key)
    whole = name if "." in name else f"{package}.{name}"
    if not _can_be_imported(whole):
        raise _missing(package, name, attribute, key)
    return whole


def module_sha256(name: str, key: str) -> str:
    """SHA-256 of the file of one's own module; of a package, of all its files. Raises UserError where there is none."""
    find_extension("", name, "Model", key)
    spec = find_spec(name)
    assert spec is not None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in sorted(place.rglob("*.py"))] or [Path(str(spec.origin))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _missing(package: str, name: str, attribute: str, key: str) -> UserError:
    where = f"no module {name} on Python's path" if "." in name else f"no {package.replace('.', '/')}/{name}.py"
    return UserError(f"{key}={name}: there is {where} that has a {attribute}")


def _can_be_imported(name: str) -> bool:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or parts[0] in sys.stdlib_module_names:
        return False
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def extension_with(setting: str) -> Any:
    """The module of `landmark.extensions` that reads a setting such as "model.masked". Raises UserError: none does."""
    package = import_module("landmark.extensions")
    for found in pkgutil.iter_modules(package.__path__):
        module = import_module(f"{package.__name__}.{found.name}")
        if setting in module.SETTINGS:
            return module
    raise UserError(f"{setting}: there is no such setting; experiments/tried.md has those that were removed")


def hooks(config: Any, name: str) -> list[Callable[..., Any]]:
    """The functions of this name of the extensions whose settings are set. Raises UserError where one is missing."""
    own = [item.name for item in fields(config.model) if item.metadata.get("extension")]
    modules = dict.fromkeys(extension_with(f"model.{each}") for each in own if getattr(config.model, each))
    return [getattr(module, name) for module in modules if hasattr(module, name)]


def hook(config: Any, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The function of this name of an extension whose setting is set; `usual` where there is none."""
    return [usual, *hooks(config, name)][-1]
