"""Launches: which rows an experiment was launched with, at which settings, and what has come of them.

Each launch leaves `launches/ID.json` below the output folder: its overrides, figure and comparisons, and for each row
and seed the identities of run and row. The report and `task=status` read it.
"""

import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from landmark.config import Config
from landmark.config.command_line import override_key, own_folder, program
from landmark.config.composer import parse
from landmark.config.rows import cells, named
from landmark.experiment.identity import digest
from landmark.experiment.jobs import Job
from landmark.experiment.provenance import now
from landmark.experiment.records import Contents, Record, Records
from landmark.utils.errors import UserError
from landmark.utils.files import read_json, write_json

# Keys of one command alone, and keys that decide no number: launches that differ in them are the same launch.
_OF_A_COMMAND = ("output", "row", "run", "task")
_WITHOUT_EFFECT = (*_OF_A_COMMAND, "logger", "trainer", "data.cache", "data.workers", "tokenizer.file")
_WITHOUT_EFFECT += ("eval.batch_size", "train.micro_batch", "train.checkpoint_every")
_NOTED = {"experiment": str, "overrides": list, "labels": dict, "figure": str, "time": str}
_NOTED |= dict.fromkeys(("compare", "cells", "rows"), dict)
_TITLED = ("experiment", "size", "data", "tokenizer", "data.path")  # named by a launch's labels


@dataclass(frozen=True)
class Entry:
    """One row of one seed. run, row: identities; run_name: of the run's folder, None where nothing is trained."""

    seed: int
    run: str
    row: str
    run_name: str | None


@dataclass(frozen=True)
class Launch:
    """An experiment as it was launched.

    overrides: those of the command line. labels: size, data and tokenizer. cells: of rows that make up a grid, the
    value on each axis. rows: the entries of each row by its name, one per seed; none of a row that was not asked for.
    config_dir: the folder of settings of one's own, where there was one.
    """

    experiment: str
    overrides: list[str]
    labels: dict[str, str]
    figure: str = "rows"
    compare: dict[str, list[str]] = field(default_factory=dict)
    cells: dict[str, dict[str, str]] = field(default_factory=dict)
    rows: dict[str, list[Entry]] = field(default_factory=dict)
    config_dir: str | None = None

    @property
    def settings(self) -> str:
        """Size, data, tokenizer and other settings, by which launches of one experiment are told apart."""
        rest = [word for word in _effective(self.overrides) if override_key(word) not in _TITLED]
        return ", ".join([*self.labels.values(), *rest])

    def has(self, overrides: Sequence[str]) -> bool:
        """Whether it was launched with the settings of a command line, and perhaps with more."""
        own = {*_OF_A_COMMAND, "experiment", "seed"}
        return {word for word in _effective(overrides) if override_key(word) not in own} <= set(self.overrides)

    @property
    def id(self) -> str:
        return _identity(self.experiment, self.overrides)

    @property
    def command(self) -> str:
        """The command that makes what is missing."""
        return shlex.join([*self.program, *["-m"] * self.is_sweep, *self.overrides])

    @property
    def program(self) -> list[str]:
        """The words before the overrides, with the folder of settings of one's own."""
        return [*program(), *(["--config-dir", self.config_dir] if self.config_dir else [])]

    @property
    def is_sweep(self) -> bool:
        """Whether its rows are the jobs of a sweep without an experiment."""
        return is_free_sweep(self.overrides)

    def found(self, contents: Contents) -> dict[str, list[Record]]:
        """Records of the rows that have one for each seed."""
        return {
            name: [contents.rows[entry.row] for entry in entries]
            for name, entries in self.rows.items()
            if entries and all(entry.row in contents.rows for entry in entries)
        }


def launch_of(config: Config, overrides: Sequence[str], tokenizer: str, jobs: Sequence[Job]) -> Launch:
    """An experiment as this command launches it.

    Args:
        config: of the experiment.
        overrides: those of the command line.
        tokenizer: name of the rows' tokenizer, which may say more than its setting.
        jobs: of the rows that the command asks for.
    """
    rows: dict[str, list[Entry]] = {name: [] for name in named(config) | named(config, overrides)}
    for job in jobs:
        name = None if job.run.is_given else job.run.folder.name
        rows.setdefault(job.name, []).append(Entry(job.config.seed, job.run.id, job.id, name))
    return Launch(
        experiment=config.name,
        overrides=_kept(config, overrides),
        labels={"size": config.size, "data": config.data.name, "tokenizer": tokenizer},
        figure=config.figure,
        compare=config.compare,
        cells=cells(config) | cells(config, overrides),
        rows=rows,
        config_dir=str(own) if (own := own_folder()) else None,
    )


def launch_id(config: Config, overrides: Sequence[str]) -> str:
    """Identity of the launch of an experiment by these overrides, whatever its jobs."""
    return _identity(config.name, _kept(config, overrides))


def _identity(experiment: str, overrides: Sequence[str]) -> str:
    return digest({"experiment": experiment, "overrides": sorted(_effective(overrides))})


def _kept(config: Config, overrides: Sequence[str]) -> list[str]:
    """The overrides without those of one command alone."""
    left_out = {*_OF_A_COMMAND, *(() if is_free_sweep(overrides) else config.grid.axes)}
    return [word for word in overrides if override_key(word) not in left_out]


def is_free_sweep(overrides: Sequence[str]) -> bool:
    """Whether a command line sweeps settings without an experiment."""
    parsed = parse(overrides)
    return any(each.is_sweep_override() for each in parsed) and all(
        each.key_or_group != "experiment" for each in parsed
    )


def write_launch(records: Records, launch: Launch) -> None:
    """Note a launch. Rows that this command did not ask for keep the entries of earlier commands."""
    path = _path(records, launch.id)
    with records.lock("launches", launch.id):
        with suppress(UserError):  # there is no note yet, or none that can be read
            known = _read(path)
            asked_for = {name: entries for name, entries in launch.rows.items() if entries}
            rows = {name: [] for name in launch.rows} | known.rows | asked_for
            launch = replace(launch, rows=rows, cells=known.cells | launch.cells)
        write_json(path, asdict(launch) | {"time": now()})


def read_launches(records: Records, contents: Contents, experiment: str | None = None) -> list[Launch]:
    """The launches of an output folder, by experiment and time.

    experiment: only launches of this one. A note that cannot be read is named in `contents.damaged`. Of launches with
    the same rows, the last is taken.
    """
    found: dict[tuple[Any, ...], Launch] = {}
    output = [] if str(records.output) == Config.output else [f"output={records.output}"]
    for path in sorted(_path(records, "x").parent.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path)):
        try:
            launch = _read(path)
        except UserError as error:
            contents.damaged.append(str(error))
            continue
        if experiment in (None, launch.experiment):
            key = launch.experiment, *((name, *entries) for name, entries in launch.rows.items())
            found.pop(key, None)
            found[key] = replace(launch, overrides=[*launch.overrides, *output])
    return sorted(found.values(), key=lambda launch: launch.experiment)


def rows_without_launch(contents: Contents, launches: Iterable[Launch]) -> list[Record]:
    """Records of rows that belong to none of these launches: of free sweeps, or of settings an experiment had once."""
    launched = {entry.row for launch in launches for entries in launch.rows.values() for entry in entries}
    return [record for record in contents.rows.values() if record["id"] not in launched]


def _read(path: Path) -> Launch:
    note = read_json(path, _NOTED, "delete it, the next launch writes it anew")
    try:
        note.pop("time")
        if not all(isinstance(word, str) for word in (*note["overrides"], *note["labels"].values())):
            raise TypeError("overrides and labels are texts")
        rows = {name: [Entry(**entry) for entry in entries] for name, entries in note.pop("rows").items()}
        return Launch(**note, rows=rows)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a whole note of a launch: delete it, the next launch writes it anew") from error


def _path(records: Records, identity: str) -> Path:
    return records.output / "launches" / f"{identity}.json"


def _effective(overrides: Sequence[str]) -> list[str]:
    """The overrides that decide numbers."""
    return [
        word
        for word in overrides
        if not any(override_key(word) == key or override_key(word).startswith(f"{key}.") for key in _WITHOUT_EFFECT)
    ]
