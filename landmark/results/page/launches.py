"""The launches of an output folder as the page needs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from landmark.experiment import survey
from landmark.experiment.identity import run_name
from landmark.experiment.records import Record


@dataclass(frozen=True)
class Entry:
    """A row of one seed. run: identity of its run; run_folder: where the run's metrics are, None for a foreign run."""

    run: str | None
    run_folder: Path | None


@dataclass(frozen=True)
class Launch:
    """An experiment as it was launched."""

    name: str
    settings: str
    overrides: list[str]
    compare: dict[str, list[str]]
    figure: str
    cells: dict[str, dict[str, str]]
    rows: dict[str, list[Entry]]
    found: dict[str, list[Record]]
    missing: list[str]


def launches_of(shelf: survey.Shelf, launches: Sequence[survey.Launch]) -> list[Launch]:
    """The launches with the folders of their runs."""

    def entry(each: survey.Entry) -> Entry:
        foreign = each.run is None or each.config.run is not None
        folder = None if foreign else shelf.records.output / "runs" / run_name(each.config, each.run or "")
        return Entry(each.run, folder)

    return [
        Launch(
            name=each.name,
            settings=each.settings,
            overrides=each.overrides,
            compare=each.config.compare,
            figure=each.config.figure,
            cells={row.name: row.cell for row in each.rows if row.cell is not None},
            rows={name: [entry(one) for one in entries] for name, entries in each.entries.items()},
            found=each.found,
            missing=each.missing,
        )
        for each in launches
    ]
