"""task=report: one HTML page of all experiments with a record, or of one of them."""

from landmark.cli.command import Command
from landmark.config.command_line import override_key
from landmark.experiment.launches import read_launches
from landmark.results.page import as_html, page_content
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
    content = page_content(records, contents, launches, others=experiment is None)
    if not content["sections"]:
        raise UserError(f"{records.output}: there are no records to report")
    path = records.output / (f"report-{experiment}.html" if experiment else "report.html")
    write_atomic(path, page := as_html(content))
    print(*content["problems"], f"written: {path}, {len(page.encode()) / 1e3:,.0f} kB", sep="\n")


def refuse_settings(command: Command, *also: str) -> None:
    """Raise UserError where a setting has no effect on a task that covers every launched setting.

    also: keys that have an effect besides.
    """
    for word in command.overrides:
        if override_key(word).partition(".")[0] not in (*_READ, *also):
            hint = "" if also else ", or name an +experiment"
            raise UserError(f"task={command.config.task} covers every launched setting: leave out {word}{hint}")
