"""task=report: one HTML page of all experiments with a record, or of one of them."""

import shlex

from landmark.cli.command import Command
from landmark.config.composer import parse
from landmark.config.rows import named
from landmark.experiment.launches import read_launches
from landmark.results import report
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic

_READ = ("task", "output", "logger", "trainer")  # settings that have an effect on this task


def run(command: Command) -> None:
    """Write the page. Raises UserError where there is nothing to show, or for a setting that has no effect here."""
    config, records = command.config, command.runner.records
    experiment = config.name if command.is_experiment else None
    refuse_settings(command, *(["experiment"] if experiment else []))
    contents = records.read_all()
    launches = read_launches(records, contents, experiment)
    content = report.collect(records, contents, launches, others=experiment is None)
    if not content["sections"]:
        raise UserError(f"{records.output}: there are no records to report")
    path = records.output / (f"report-{experiment}.html" if experiment else "report.html")
    write_atomic(path, page := report.page(content))
    print(*content["problems"], f"written: {path}, {len(page.encode()) / 1e3:,.0f} kB", sep="\n")


def refuse_settings(command: Command, *also: str) -> None:
    """Raise UserError where a setting has no effect on a task that covers every launched setting.

    also: keys that have an effect besides.
    """
    read = (*_READ, *also)
    for override in parse(_given(command)):
        if override.key_or_group.partition(".")[0] not in read:
            raise UserError(
                f"task={command.config.task} is of every setting that was launched: leave out {override.input_line}"
                + ("" if also else ", or name an +experiment")
            )


def _given(command: Command) -> list[str]:
    """The command line's overrides: those of a row before its own."""
    row, texts = command.rows[0], named(command.config)
    own = len(shlex.split(texts[row.name])) if texts else 0
    return row.overrides[: len(row.overrides) - own]
