"""task=report: one HTML page of all experiments with a record, or of those that the command line names."""

from landmark.cli.command import Command
from landmark.config.command_line import override_key
from landmark.experiment.records import Contents
from landmark.results.page import as_html, page_content
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic

_OF_A_TASK = ("experiment", "output", "row", "run", "seed", "task")


def run(command: Command) -> None:
    """Write the page: of an experiment, the launches with the settings of the command line; else of all.

    Raises UserError where there is nothing to show.
    """
    config, records = command.config, command.runner.records
    experiment = config.name if command.is_experiment else None
    contents = records.read_all()
    launches = command.launches(contents)
    if experiment:
        asked = {word for word in command.overrides if override_key(word) not in (*_OF_A_TASK, *config.grid)}
        launches = [each for each in launches if each.experiment == experiment and asked <= {*each.overrides}]
    content = page_content(contents, launches, others=experiment is None)
    if not content["sections"]:
        raise UserError(_nothing(command, contents))
    if not experiment and not command.asks_for_all:
        print(f"the page covers everything in {records.output}: no +experiment is named")
    path = records.output / (f"report-{experiment}.html" if experiment else "report.html")
    write_atomic(path, page := as_html(content))
    print(*content["problems"], f"written: {path}, {len(page.encode()) / 1e3:,.0f} kB", sep="\n")


def _nothing(command: Command, contents: Contents) -> str:
    """A message: of what there are no records, and of what there are some."""
    place, name = command.runner.output, command.config.name
    if not command.is_experiment or not contents.rows:
        return f"{place}: there are no records to report"
    others = [each for each in command.launches(contents) if each.experiment == name and each.found(contents)]
    if others:
        known = "; ".join(each.settings for each in others)
        return f"{place}: {name} has no records with these settings, but with others: {known}"
    known = sorted({str(record["labels"].get("experiment")) for record in contents.rows.values()})
    return f"{place}: {name} has no records yet, `{command.suggest()}` makes them; there are some of {', '.join(known)}"
