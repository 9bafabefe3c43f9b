"""Which tables the records of an output folder make up, at which settings, and what each still lacks.

A record names the command-line overrides that made it, but serves every experiment with a row of the same identity.
So each experiment is composed as it was launched, and its rows are looked up by the identities that they have with the
tokenizer and the texts of the records that this launch left: no corpus is opened. Loads no torch.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import OmegaConf

from landmark.config import SYNTHETIC, Config, from_dict, rows, to_config
from landmark.config.command_line import one_line
from landmark.config.composer import CONF, Composer
from landmark.config.rows import Row
from landmark.experiment import identity
from landmark.experiment.records import Kind, Record, Records, read_record
from landmark.utils.errors import UserError

# Of what is set on the command line, what decides no number and may differ between launches of one experiment.
_OF_NO_WEIGHT = ("output", "logger", "trainer", "row", "task", "data.cache", "data.workers", "tokenizer.file")
_OF_NO_WEIGHT += ("eval.batch_size", "train.micro_batch", "train.checkpoint_every")


@dataclass(frozen=True)
class Entry:
    """A row of one seed: its run and what is known of both. run, row: identities, None where not to be known."""

    name: str
    config: Config
    run: str | None
    row: str | None
    trained: Record | None
    record: Record | None


@dataclass(frozen=True)
class Launch:
    """An experiment as it was launched: `overrides` are those of the command line, at this output folder."""

    config: Config
    overrides: list[str]
    rows: list[Row]
    entries: dict[str, list[Entry]]  # by the name of the row, one per seed

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def settings(self) -> str:
        """What tells launches of one experiment apart: size, data, tokenizer and what else was set."""
        config = self.config
        known = [entry.record or entry.trained for entries in self.entries.values() for entry in entries]
        labels = next((each["labels"] for each in known if each is not None), {})
        told = [config.size, config.data.name, labels.get("tokenizer", config.tokenizer.name)]
        also = ("experiment", "size", "data", "tokenizer", "data.path")
        rest = [word for word in self.overrides if not _is_weightless(word) and _key(word) not in also]
        return ", ".join([*told, *rest])

    @property
    def found(self) -> dict[str, list[Record]]:
        """Records of the rows that have one for each seed."""
        made = {name: [entry.record for entry in entries] for name, entries in self.entries.items()}
        return {
            name: [each for each in records if each is not None]
            for name, records in made.items()
            if None not in records
        }

    @property
    def missing(self) -> list[str]:
        return [name for name in self.entries if name not in self.found]


@dataclass
class Shelf:
    """Every record and note of an output folder, and what could not be read."""

    records: Records
    runs: dict[str, Record]
    made: dict[str, Record]  # rows
    attempts: list[Record]
    damaged: list[str]

    @classmethod
    def read(cls, records: Records) -> "Shelf":
        damaged: list[str] = []
        kinds: dict[Kind, dict[str, Record]] = {"runs": {}, "rows": {}}
        for kind, found in kinds.items():
            for path in sorted(records.path(kind, "x").parent.glob("*.json")):
                try:
                    found[path.stem] = _checked(read_record(path, path.stem), str(path))
                except UserError as error:
                    damaged.append(str(error))
        return cls(records, kinds["runs"], kinds["rows"], records.attempts(), damaged)

    def notes(self, kind: Kind) -> list[Record]:
        """Records of a kind, and the notes of what has none yet."""
        made = self.runs if kind == "runs" else self.made
        return [*made.values(), *(note for note in self.attempts if note["kind"] == kind)]

    @cached_property
    def of_run(self) -> dict[str, list[Record]]:
        """Rows by the identity of their run."""
        found = defaultdict(list)
        for note in self.notes("rows"):
            found[note["settings"]["run"]].append(note)
        return found


def experiments() -> list[str]:
    """Names of all experiments that can be launched."""
    return sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def launches(shelf: Shelf, compose: rows.Compose, experiment: str | None = None) -> Iterator[Launch]:
    """Every experiment with a record or a note, once for each setting that it was launched with and each text.

    experiment: only that one. What cannot be composed any more is left out, and said among what is damaged.
    """
    composer = Composer(compose)
    for name in experiments() if experiment is None else [experiment]:
        found: dict[tuple[str | None, ...], Launch] = {}
        for overrides, own in _launched(name, shelf.notes("rows") + shelf.notes("runs")):
            overrides += [] if (output := str(shelf.records.output)) == Config.output else [f"output={output}"]
            try:
                config = to_config(composer(overrides))
                launch = Launch(config, overrides, rows.select(config, overrides, composer), {})
            except Exception as error:  # what an older or a mistyped launch may raise is Hydra's to choose
                shelf.damaged.append(
                    f"{name} as it was launched is no table, its rows are among the others: {one_line(error)}"
                )
                continue
            for each in _on_each_text(launch, own, shelf):
                entries = [entry for entries in each.entries.values() for entry in entries]
                found[tuple(part for entry in entries for part in (entry.run, entry.row))] = each
        yield from found.values()


def unplaced(shelf: Shelf, found: Iterable[Launch]) -> list[Record]:
    """Records of rows that belong to none of these: free sweeps, and what an experiment no longer has."""
    placed = {entry.row for launch in found for entries in launch.entries.values() for entry in entries}
    return [record for record in shelf.made.values() if record["id"] not in placed]


def _checked(record: Record, path: str) -> Record:
    """With the labels and settings that are read here."""
    for part, keys in {"labels": ("size", "data", "tokenizer", "seed"), "provenance": ("hardware", "time")}.items():
        if missing := [key for key in keys if key not in record[part]]:
            raise UserError(f"{path} is not a whole record, {part}.{missing[0]} is missing: delete it to make it anew")
    return record


def _launched(name: str, notes: Sequence[Record]) -> list[tuple[list[str], list[Record]]]:
    """Command-line overrides with which an experiment was launched, the last of those that decide the same, and the
    records and notes that this left."""
    group: Any = OmegaConf.load(CONF / "experiment" / f"{name}.yaml")
    own = {row: shlex.split(text) for row, text in (group.get("rows") or {}).items()}
    axes = set((group.get("grid") or {}).get("axes") or {})
    found: dict[tuple[str, ...], tuple[list[str], list[Record]]] = {}
    for note in sorted(notes, key=_time):
        given = note["labels"].get("overrides") or []
        if f"+experiment={name}" not in given:
            continue
        ending = max((text for text in own.values() if given[-len(text) :] == text), key=len, default=None)
        if ending is None and axes:  # a cell of the grid: what they share, and a value on each axis
            ending = [*shlex.split(group.grid.row), *axes]
        if ending is None:
            continue
        shared = [word for word in given[: -len(ending)] if _key(word) not in ("row", "task", "output", *axes)]
        key = tuple(sorted(word for word in shared if not _is_weightless(word)))
        found[key] = shared, [*found.get(key, ([], []))[1], note]
    return list(found.values())


def _on_each_text(launch: Launch, own: Sequence[Record], shelf: Shelf) -> Iterator[Launch]:
    """The launch once for each text that its own rows were evaluated on; samples that are made as needed are one."""
    made = launch.config.data.name in SYNTHETIC
    evaluated = [note for note in own if "run" in note["settings"]]
    trained = [note["settings"] for note in own if "run" not in note["settings"]]
    trained += [shelf.runs[run]["settings"] for note in evaluated if (run := note["settings"]["run"]) in shelf.runs]
    begun = {(each["tokenizer"], each["stream"], each.get("start")) for each in trained if "stream" in each}
    streams = {note["settings"]["stream"]: None for note in evaluated}
    for texts in [set(streams)] if made or not streams else [{stream} for stream in streams]:
        entries = {
            row.name: [_entry(row.name, one, _runs(one, begun), texts, evaluated, shelf) for one in row.configs]
            for row in launch.rows
        }
        yield replace(launch, entries=entries)


def _runs(config: Config, begun: Iterable[tuple[str, str, str | None]]) -> list[str]:
    """Identities that the run of a configuration has with a tokenizer and a text, or after other weights."""
    if config.run is not None:  # whose settings are its own
        return []
    found: dict[str, None] = {}
    for tokenizer, stream, start in sorted(begun, key=str):
        if config.start_run is not None:
            start = identity.digest(identity.run_settings(from_dict(Config, config.start_run), tokenizer, stream))
        elif config.model.name is None:
            start = None
        found[identity.digest(identity.run_settings(config, tokenizer, stream, start))] = None
    return list(found)


def _entry(
    name: str, config: Config, runs: Sequence[str], texts: set[str], own: Sequence[Record], shelf: Shelf
) -> Entry:
    """The newest row with these settings on one of the texts, of the launch's own by this name if there is any."""
    own = [note for note in own if note["labels"].get("row") == name and note["labels"]["seed"] == config.seed]
    named = {note["id"] for note in own}
    found = [
        note
        for run in dict.fromkeys([*runs, *(note["settings"]["run"] for note in own)])
        for note in shelf.of_run.get(run, [])
        if note["settings"]["stream"] in texts and note["id"] == _row(config, run, note["settings"])
    ]
    best = max(found, key=lambda note: (note["id"] in named, note["id"] in shelf.made, _time(note)), default=None)
    if best is None:
        run = max(runs, key=lambda run: (run in shelf.runs, _time(shelf.runs.get(run))), default=None)
        return Entry(name, config, run, None, shelf.runs.get(run or ""), None)
    run, row = best["settings"]["run"], best["id"]
    return Entry(name, config, run, row, shelf.runs.get(run), shelf.made.get(row))


def _row(config: Config, run: str, known: Record) -> str:
    """Identity of a row on the texts that another was read on."""
    settings = identity.row_settings(config, run, known["stream"])
    if config.cmt.per_layer:
        settings["validation"] = known.get("validation")
    return identity.digest(settings)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _is_weightless(word: str) -> bool:
    return any(_key(word) == key or _key(word).startswith(f"{key}.") for key in _OF_NO_WEIGHT)


def _time(note: Record | None) -> Any:
    if note is None:
        return ""
    return note.get("time") or note["provenance"]["time"]
