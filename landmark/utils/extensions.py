"""Extensions: those of the package (`landmark.extensions`), and one's own, each a file.

A corpus of one's own is docs/add_a_corpus.md, a model docs/add_a_model.md.
"""

import pkgutil
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from landmark.utils.errors import UserError


def load_extension(package: str, name: str, attribute: str, key: str) -> Any:
    """Load an attribute of an extension's module.

    Args:
        package: dotted name of the package that has the module, where its name has no dot.
        name: of the module, from the configuration; or the whole name of one outside of this package, with a dot.
        attribute: of the module.
        key: setting that gives `name`, for the message.

    Raises UserError if there is no such module or attribute. Modules of Python's library are not imported: a saved
    model may name one.
    """
    whole = name if "." in name else f"{package}.{name}"
    found = getattr(import_module(whole), attribute, None) if _can_be_imported(whole) else None
    if found is None:
        where = f"no module {name} on Python's path" if "." in name else f"no {package.replace('.', '/')}/{name}.py"
        raise UserError(f"{key}={name}: there is {where} that has a {attribute}")
    return found


def _can_be_imported(name: str) -> bool:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or parts[0] in sys.stdlib_module_names:
        return False
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def extension_with(setting: str) -> Any:
    """The module of `landmark.extensions` that reads a setting, by its full name such as "model.fan_out".

    Raises UserError where none does.
    """
    package = import_module("landmark.extensions")
    for found in pkgutil.iter_modules(package.__path__):
        module = import_module(f"{package.__name__}.{found.name}")
        if setting in module.SETTINGS:
            return module
    raise UserError(f"{setting}: no module of landmark/extensions has this setting, leave it at null")
