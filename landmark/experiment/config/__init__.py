"""What can be set: the typed schema, an experiment's rows, checks of settings that belong together. Loads no torch."""

from landmark.experiment.config.schema import SYNTHETIC, Config, memory_settings, register, to_config

__all__ = ["SYNTHETIC", "Config", "memory_settings", "register", "to_config"]
