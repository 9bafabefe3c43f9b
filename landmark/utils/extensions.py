"""Extensions: those of the package (`landmark.extensions`), and one's own, each a file.

A corpus of one's own is docs/add_a_corpus.md, a model docs/add_a_model.md.
"""

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from landmark.utils.errors import UserError


def load_extension(package: str, name: str, attribute: str, key: str) -> Any:
    """Load an attribute of an extension's module.

    Args:
        package: dotted name of the package that has the module.
        name: of the module, from the configuration.
        attribute: of the module.
        key: setting that gives `name`, for the message.

    Raises UserError if there is no such module or attribute.
    """
    spec = find_spec(f"{package}.{name}") if name.isidentifier() else None
    found = None if spec is None else getattr(import_module(spec.name), attribute, None)
    if found is None:
        raise UserError(f"{key}={name}: there is no {package.replace('.', '/')}/{name}.py that has a {attribute}")
    return found


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
