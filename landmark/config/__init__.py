"""What can be set: the typed schema, an experiment's rows, checks of settings that belong together. Loads no torch."""

from landmark.config.schema import SYNTHETIC, Config, from_dict, register, to_config, to_dict

__all__ = ["SYNTHETIC", "Config", "from_dict", "register", "to_config", "to_dict"]
