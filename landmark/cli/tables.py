"""What was measured: `table` prints and draws the rows that have a record, `card` writes a model card."""

import hashlib
import math
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from landmark.cli.command import Command
from landmark.config import Config
from landmark.config.command_line import override_key, program
from landmark.config.composer import parse
from landmark.config.rows import cell_name
from landmark.experiment.identity import digest
from landmark.experiment.jobs import folder_of, read_run
from landmark.experiment.launches import launch_id
from landmark.experiment.records import Record
from landmark.results import render, tables
from landmark.results.columns import provenance_of
from landmark.results.paper import read_paper
from landmark.tracking.wandb_run import mode
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic
from landmark.utils.setting import flat

_NAMED = 13  # rows without a record that are named; experiments have up to 151


def show_records(command: Command) -> None:
    """Show the rows that have a whole record for each seed, and name damaged records. Raises UserError as `show`."""
    contents = command.runner.records.read_all()
    print(*contents.damaged, sep="\n", end="\n" if contents.damaged else "")
    found: dict[str, list[Record | None]] = {}
    for job in command.runner.planned_jobs(command.rows):
        found.setdefault(job.name, []).append(contents.rows.get(job.id))
    show(command, {name: [one for one in each if one] for name, each in found.items() if None not in each})


def show_sweep(config: Config, overrides: list[str], jobs: Sequence[Mapping[str, str]]) -> None:
    """The same of a sweep without an experiment: a row for each job, of two axes also a heat map.

    Args:
        config: of the sweep without what it sweeps; by default its name is `sweep`.
        overrides: those of the command line.
        jobs: of each the keys that are swept with its values.
    """
    axes: dict[str, list[str]] = {key: [] for job in jobs for key in job}
    for key, values in axes.items():
        values += dict.fromkeys(job[key] for job in jobs if key in job)
    name = "sweep" if config.name == Config.name else config.name
    asked = [each for each in parse(overrides) if each.is_sweep_override()]
    is_grid = all(axes.keys() == job.keys() for job in jobs)
    is_grid = is_grid and len(jobs) == math.prod(len({*each.sweep_string_iterator()}) for each in asked)
    if is_grid:
        figure = "heatmap" if len(axes) == 2 else "rows"
        config = replace(config, name=name, task="table", grid=dict(axes), figure=figure)
    else:
        rows = {cell_name(job) or "as_is": shlex.join(f"{key}={value}" for key, value in job.items()) for job in jobs}
        config = replace(config, name=name, task="table", rows=rows)
    given = overrides if is_grid else [word for word in overrides if override_key(word) not in axes]
    show_records(replace(Command.of(config, given), overrides=overrides))


def show(command: Command, found: Mapping[str, Sequence[Record]]) -> None:
    """Print, draw and log the table of these records, and name the rows without one.

    found: records of each row, one per seed. Raises UserError where there are none.
    """
    config, names = command.config, [row.name for row in command.rows]
    missing = [name for name in names if name not in found]
    note = f"{len(missing)} of {len(names)} rows have no record yet, `{command.suggest()}` makes them: "
    note += ", ".join(missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
    if not found:
        raise UserError(note)
    built = tables.build(
        config.name,
        found,
        paper=read_paper(config.name),
        comparisons=config.compare,
        figure=config.figure,
        cells={row.name: row.cell for row in command.rows if row.cell is not None},
        asked=names,
        panels=config.panels,
    )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(f"\n{render.as_text(built, width)}")
    folder, launch = command.runner.output / "tables", launch_id(config, command.overrides)
    is_changed = not render.is_written(built, folder, launch)
    paths = render.write(built, folder, launch)
    print(f"written: {', '.join(str(path) for path in paths.values())}, and by the settings: {built.stem}-{launch}.*")
    print(f"picture: {paths['png'].resolve().as_uri()}")
    if is_changed:
        used = [record for records in found.values() for record in records]
        _log(command, built, launch, list(paths.values()), used)
    if missing:
        print(note)
    for line in _next_commands(command, found):
        print(line)


def _next_commands(command: Command, found: Mapping[str, Sequence[Record]]) -> list[str]:
    """The commands to try next, with the folders of the runs; those whose row has no record are left out."""
    folders = {name: records[0]["labels"]["run"] for name, records in found.items()}
    folders["stdlib"] = sysconfig.get_path("stdlib")
    lines = []
    for title, text in command.config.next_commands.items():
        with suppress(KeyError):
            words = [word.format_map(folders) for word in shlex.split(text)]
            if Path(command.runner.output) != Path(Config.output):
                words.append(f"output={command.runner.output}")
            lines += [f"  # {title}", f"  {shlex.join([*program(), *words])}"]
    return ["try next:", *lines] if lines else []


def _log(command: Command, table: tables.Table, launch: str, files: list[Path], records: list[Record]) -> None:
    """Log a table of a launch that has changed to W&B."""
    identity = hashlib.sha256(f"{table.name} {table.stem} {launch}".encode()).hexdigest()[:10]
    used = [command.runner.records.path("rows", record["id"]) for record in records]
    command.runner.tracker.table(command.config, identity, *render.plain(table), files, used)
    if mode(command.config.logger) == "offline":
        print(f"W&B: kept offline; `wandb sync {command.runner.output}/wandb/offline-run-*` uploads it")


_USE = {
    "transformers": """model, tokenizer = landmark.huggingface.load("{name}")  # a folder, or its name on the hub
ids = tokenizer("A long text …", return_tensors="pt").input_ids
answer = model.generate(ids, max_new_tokens=20)
print(tokenizer.decode(answer[0, ids.shape[1] :]))""",
    "landmark": """model, tokenizer = landmark.load("{name}")  # the folder that holds this file""",
}


def write_card(command: Command) -> None:
    """Raises UserError where `run` names none, it has no record, or its folder has a README.md."""
    if command.config.run is None:
        raise UserError("task=card: name a trained run, run=latest, its name or its folder")
    folder, records = folder_of(command.config, command.runner.inputs), command.runner.records
    identity, path = digest(read_run(folder)), folder / "README.md"
    if path.exists():
        raise UserError(f"{path} is there already, perhaps with your changes: delete it to write it anew")
    if (record := records.find("runs", identity)) is None:
        raise UserError(f"{folder}: {records.output} has no record of this run; name the output= that has it")
    rows = {}
    for row in (each for each in records.read_all().rows.values() if each["settings"]["run"] == identity):
        name = row["labels"]["row"]
        rows[name if name not in rows else f"{name} ({row['id']})"] = [row]
    library = "transformers" if (folder / "tokenizer_config.json").is_file() else "landmark"  # which opens the folder
    write_atomic(path, model_card(folder.name, library, record, rows))
    print(f"written: {path}, with {len(rows)} rows; its license is yours to fill in")


def model_card(name: str, library: str, run: Record, rows: Mapping[str, Sequence[Record]]) -> str:
    """The text of README.md beside a model.

    Args:
        name: of the run.
        library: that opens it, `transformers` or `landmark`.
        run: its record.
        rows: records of what was evaluated, by the name of a row.
    """
    labels, results, made = run["labels"], run["results"], provenance_of(run)
    size = f" of {results['parameters']:,} parameters" if "parameters" in results else ""
    module = "landmark.huggingface" if library == "transformers" else "landmark"
    measured = render.as_markdown(tables.build("evaluated", rows)) if rows else "Nothing was evaluated yet.\n"
    settings = "\n".join(f"| {key} | {value} |" for key, value in flat(run["settings"]).items() if value is not None)
    return f"""---
# license: of the text it was trained on, and of the model it started from, decide it
library_name: {library}
pipeline_tag: text-generation
tags: [landmark-attention, long-context]
---

# {name}

A model{size}, trained on {labels["data"]} (tokenizer {labels["tokenizer"]}, seed {labels["seed"]}) by the package
landmark, after [Landmark Attention](https://arxiv.org/abs/2305.16300).

```python
import {module}

{_USE[library].format(name=name)}
```

## Measured

Validation perplexity at the end of the training: {results["validation_perplexity"]:.2f}.

{measured}
## Training

{results["steps"]:,} steps at commit {made["commit"]} on {made["hardware"]} ({made["versions"]}), by
`{made["command"]}`.

| setting | value |
|---|---|
{settings}
"""
