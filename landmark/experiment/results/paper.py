"""What the paper printed: paper.csv in experiments/<name>, or in one's own folder, matched to rows by settings."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from landmark.experiment.config.command_line import started
from landmark.utils.errors import UserError
from landmark.utils.source_tree import EXPERIMENTS

# The settings by which our rows and the paper's are matched.
JOINED = ("model", "block_size", "eval_length", "local", "cache", "blocks", "k", "granularity")
CUTOFF = "cutoff"  # of the context miss token; only its table has this column


def folder_of_experiment(name: str) -> Path:
    """Where its README and the paper's numbers are, if it has any."""
    own = started().config_dir
    return own / "experiments" / name if own and (own / "experiments" / name).is_dir() else EXPERIMENTS / name


def read_paper(name: str) -> list[dict[str, str]]:
    """The paper's rows of an experiment, empty where there are none. Raises UserError where a column is missing."""
    path = folder_of_experiment(name) / "paper.csv"
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [key for key in (*JOINED, "dataset", "perplexity_paper") if rows and key not in rows[0]]
    if missing:
        raise UserError(f"{path}: column {', '.join(missing)} is missing")
    return rows


def published(record: dict[str, Any], paper: Sequence[dict[str, str]]) -> dict[str, str]:
    """The paper's row with a record's settings, or nothing. Raises UserError where two of its rows have them."""
    settings = record["labels"] | record["settings"]
    ours_alone = ("window", "mapping", "probe", "rerank", "recent")
    if settings.get("scorer", "landmark") != "landmark" or any(settings.get(key) is not None for key in ours_alone):
        return {}
    ours = {key: "" if settings.get(key) is None else str(settings[key]) for key in JOINED}
    ours["dataset"] = settings["data"]
    ours[CUTOFF] = str(settings.get("cmt_cutoff", ""))
    found = [row for row in paper if all(row.get(key, "") == value for key, value in ours.items())]
    if len(found) > 1:
        raise UserError(f"paper.csv has {len(found)} rows with the same settings: {ours}")
    return found[0] if found else {}
