"""What the settings of every memory have: one frozen dataclass, whose fields say their keys, ranges and meaning."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from landmark.utils.constants import TIERS
from landmark.utils.errors import UserError
from landmark.utils.setting import check_field, setting


@dataclass(frozen=True, repr=False)
class Settings:
    """What all settings of memories have: where it lies, checks, and how they are shown and saved."""

    tier: str = setting(
        "device",
        key="memory.tier",
        choices=TIERS,
        in_identity=False,
        about="where keys and values are kept: `cpu` is pinned memory, `disk` are files; results stay the same bits",
    )
    folder: str | None = setting(
        None,
        key="memory.folder",
        needs=("tier", ("disk",)),
        in_identity=False,
        about="where these files lie (`null`: the system's folder for temporary files)",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            key, value = item.metadata["key"], getattr(self, item.name)
            if value is None and item.default is not None:
                raise UserError(f"{key}=null: must have a value")
            check_field(key, value, item)
        for name, is_wrong, why in self._rules():
            if is_wrong:
                raise UserError(f"{self.shown(name)}: {why}")

    def _rules(self) -> list[tuple[str, Any, str]]:
        """What settings must be to each other: the one to name, whether it is wrong, and why."""
        return []

    def shown(self, name: str) -> str:
        """A setting as on the command line: retrieval.k=4."""
        key, value = self.__dataclass_fields__[name].metadata["key"], getattr(self, name)
        return f"{key}={'null' if value is None else value}"

    def updated(self, given: Mapping[str, Any]) -> Self:
        """These settings with others in their place. Raises UserError for a name that is no setting's."""
        if unknown := sorted(given.keys() - {item.name for item in fields(self)}):
            known = ", ".join(sorted(item.name for item in fields(self)))
            raise UserError(f"memory has no setting {', '.join(unknown)}: it has {known}")
        return replace(self, **given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.saved().items())})"

    def saved(self) -> dict[str, Any]:
        """The settings other than the defaults, as files have them, for `from_saved`."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) != item.default}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Self:
        """The settings of a file. Raises UserError for one that this kind of memory does not have."""
        return cls().updated(saved)
