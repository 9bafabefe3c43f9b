"""Who may name what.

- The command line, a folder of settings (`--config-dir`) and a caller in Python name modules of their own.
- A folder that is read (a run, a saved memory, an adapter) names modules of this package, and files in its own
  folder. Another module that it names is imported only where the command line names it too.
- No module is imported from a folder of results, or from one that is read.
"""

import hashlib
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from landmark.utils.errors import UserError

_named: set[str] = set()  # modules outside of this package that the command line, or a caller in Python, names


def name_modules(names: Iterable[str | None], outside: Iterable[str | Path | None] = ()) -> None:
    """Let modules be imported: whole names of the command line or a caller in Python; our own have no dot. outside:
    folders that are read, or of results. Raises UserError for a module that would lie in one of them.
    """
    folders = [_real(folder) for folder in outside if folder is not None]
    for name in (name for name in names if name is not None and "." in name):
        for entry in sys.path:
            place = _real(Path(entry or ".").joinpath(*name.split(".")))
            if inside := [folder for folder in folders if place.is_relative_to(folder)]:
                raise UserError(
                    f"{name}: lies in {inside[0]}, from which no code is run: copy it to a folder of your own"
                )
        _named.add(name)


def check_module(name: str, key: str) -> None:
    """Raise UserError for a module outside of this package that nobody has named who may. key: that gives `name`."""
    if "." in name and name not in _named:
        raise UserError(
            f"{key}={name}: only a folder that was read names this module: it is run where the command line names it "
            f"too ({key}={name}; in Python: load(…, modules=['{name}']))"
        )


def load_from_module(package: str, name: str, attribute: str, key: str) -> Any:
    """An attribute of the module `name`, which is in `package` if its name has no dot. key: setting that gives `name`.
    Raises UserError if there is none, and as `check_module`.
    """
    found = getattr(import_module(find_module(package, name, attribute, key)), attribute, None)
    if found is None:
        raise _missing(package, name, attribute, key)
    return found


def find_module(package: str, name: str, attribute: str, key: str) -> str:
    """The whole name of the module that `load_from_module` would load. Raises UserError where there is none."""
    check_module(name, key)
    whole = name if "." in name else f"{package}.{name}"
    if not _can_be_imported(whole):
        raise _missing(package, name, attribute, key)
    return whole


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


def inside(folder: str | Path, name: object) -> Path:
    """The path of a file that is named on disk. Raises UserError if it is not inside the folder."""
    folder = Path(folder)
    if not isinstance(name, str) or not _real(folder / name).is_relative_to(_real(folder)):
        raise UserError(f"{folder} names the file {name!r}, which is not in it: nothing is read from there")
    return folder / name


def _real(path: str | Path) -> Path:
    """Without links; `Path.resolve` raises RuntimeError for one that leads to itself."""
    return Path(os.path.realpath(path))


def module_sha256(name: str, key: str) -> str:
    """SHA-256 of the file of one's own module; of a package, of all its files. Raises UserError where there is none."""
    find_module("", name, "Model", key)
    spec = find_spec(name)
    assert spec is not None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in sorted(place.rglob("*.py"))] or [Path(str(spec.origin))]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
