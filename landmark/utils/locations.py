"""Folders of the source tree. An installed package has its settings and claims inside."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = (_PACKAGE / "conf").is_dir()  # from a wheel: there is no source tree around the package
ROOT = _PACKAGE.parent  # of the source tree
CONF = (_PACKAGE if INSTALLED else ROOT) / "conf"  # configurations
EXPERIMENTS = (_PACKAGE if INSTALLED else ROOT) / "experiments"  # claims and results, a folder for each table or figure
