"""Where the files that come with the program are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the source tree
CONF = ROOT / "conf"  # what can be launched
EXPERIMENTS = ROOT / "experiments"  # what was claimed and measured, a folder per table or figure
