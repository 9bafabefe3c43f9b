"""Settings that were removed (experiments/tried.md): files that name them are read only where they had no effect."""

from collections.abc import Mapping

from landmark.utils.errors import UserError

RETIRED: dict[str, tuple[object, ...]] = {  # name, in a configuration or a model's config.json → values without effect
    "block_ends": (None, "fixed"),
    "least_block_size": (None,),
    "end_ids": (None, [], ()),
    "document_end": (None,),
    "local_blocks": (None, 0),
    "landmark_values": (None, False),
    "short_convolution": (None, 1),
    "no_rope_layer_interval": (None,),
    "per_layer": (None, False),
    "rest": (None, False),
}


def check_retired(values: Mapping[str, object], where: str) -> None:
    """Raise UserError where a removed setting has an effect. where: the file, or the group of settings, they are of."""
    for name, harmless in RETIRED.items():
        if name in values and values[name] not in harmless:
            raise UserError(f"{where}: {name}={values[name]}: this setting was removed, see experiments/tried.md")


def without_retired(values: Mapping[str, object]) -> dict[str, object]:
    """The settings that are not removed ones."""
    return {name: value for name, value in values.items() if name not in RETIRED}
