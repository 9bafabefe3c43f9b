"""Folders of the source tree."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"  # configurations
EXPERIMENTS = ROOT / "experiments"  # claims and results, a folder for each table or figure
