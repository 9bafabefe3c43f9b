"""Modules under the names of earlier versions, which pickled models hold and scripts import."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {"landmark.huggingface": "landmark.models.huggingface"}


class _OldNames(MetaPathFinder, Loader):
    """Finds a module that has moved: the old name is the same module object."""

    def __init__(self):
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if self._new(fullname) is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._new(spec.name) or spec.name)
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name, which stays the one that it knows itself by."""
        module.__spec__ = self._specs[module.__name__]

    def _new(self, name: str) -> str | None:
        for old, new in MOVED.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return None


def install() -> None:
    """Let Python find moved modules. Called once, when `landmark` is imported."""
    sys.meta_path.insert(0, _OldNames())  # before files are looked for beside the module's new place
