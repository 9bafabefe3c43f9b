"""The channels of a head that a fraction stands for. Loads no torch."""


def channels_of(fraction: float, head_dim: int) -> int:
    """The nearest even number of channels, so that no pair that positions rotate is parted."""
    return 2 * round(fraction * head_dim / 2)
