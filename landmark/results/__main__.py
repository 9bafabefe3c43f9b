"""Draw the pictures of tables again from their CSVs: `python -m landmark.results experiments/*/results/*.csv`.

A picture stands beside its CSV. Its panels are those of the experiment's file; a picture that needs more than a CSV has
(maps of a text, histograms, heat maps) is left as it is.
"""

import csv
import sys
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from landmark.config.schema import PanelConfig
from landmark.results.columns import COLUMNS, TableRow
from landmark.results.tables import Table
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic
from landmark.utils.measured import kind_of
from landmark.utils.source_tree import CONF

OF_RECORDS = ("heatmap", "unique_blocks")  # figures that a CSV is not enough for


def read(path: Path) -> Table:
    """The table of a CSV below `experiments/NAME/`, without records. Raises UserError where it is none."""
    name = path.resolve().parent.parent.name
    file = CONF / "experiment" / f"{name}.yaml"
    if not file.exists():
        raise UserError(f"{path}: not below a folder of an experiment, as experiments/NAME/results is")
    with open(path, newline="", encoding="utf-8") as source:
        lines = list(csv.DictReader(source))
    if not lines or "name" not in lines[0]:
        raise UserError(f"{path}: not the CSV of a table")
    first = lines[0]
    settings: Any = OmegaConf.to_container(OmegaConf.load(file))
    return Table(
        name=name,
        size=first["size"],
        data=first["data"],
        tokenizer=first["tokenizer"],
        split=first["split"],
        amount=path.name,
        seeds=int(first["seeds"]),
        rows=[_row(line) for line in lines],
        figure=settings.get("figure", "rows"),
        panels={title: PanelConfig(**panel) for title, panel in settings.get("panels", {}).items()},
    )


def redraw(path: Path) -> Path | None:
    """Write the picture of a CSV beside it. Returns its path, or None for a picture that needs the records."""
    from landmark.results import figures

    table = read(path)
    if not table.panels and (table.figure in OF_RECORDS or any(row.second_copy is not None for row in table.rows)):
        return None
    picture = path.with_suffix(".png")
    write_atomic(picture, figures.draw(table))
    return picture


def _row(line: dict[str, str]) -> TableRow:
    """Columns of later versions are empty in earlier files."""
    known = {key: text for key, text in line.items() if text}
    kinds = get_type_hints(TableRow)
    values = {"measured": kind_of(known)} | known
    return TableRow(**{key: _parsed(values.get(key, ""), kinds[key]) for key in COLUMNS})


def _parsed(text: str, kind: Any) -> Any:
    choices = [each for each in get_args(kind) if each is not type(None)] or [kind]
    if text == "":
        return "" if kind is str else None
    return choices[0](text) if choices[0] in (str, int, float) else literal_eval(text)


def main(paths: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        for path in paths:
            picture = redraw(Path(path))
            print(f"needs its records: {path}" if picture is None else f"written: {picture}")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
