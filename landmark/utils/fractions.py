"""Settings that are a share of a whole."""

from landmark.utils.errors import UserError


def fraction(name: str, value: object, meaning: str, shown: object = None) -> float:
    """The value as a number from 0 to 1. Earlier files have true for 1 and false for 0.

    Args:
        name: of the setting.
        value: of the setting.
        meaning: end of the message, after "must be from 0 to 1, ".
        shown: the setting as the message shows it; None: the value.

    Raises UserError for anything else.
    """
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{name}={value if shown is None else shown!r}: must be from 0 to 1, {meaning}")
    return float(value)
