"""task=report: one HTML page of all experiments with a record, or of those that the command line names."""

from landmark.cli.command import Command
from landmark.config.command_line import override_key
from landmark.experiment.launches import read_launches
from landmark.results.page import as_html, page_content
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic


def run(command: Command) -> None:
    """Write the page: of an experiment, the launches with the settings of the command line; else of all.

    Raises UserError where there is nothing to show.
    """
    config, records = command.config, command.runner.records
    experiment = config.name if command.is_experiment else None
    contents = records.read_all()
    launches = read_launches(records, contents, experiment)
    if experiment:
        asked = [word for word in command.overrides if override_key(word) not in config.grid.axes]
        launches = [launch for launch in launches if launch.has(asked)]
    content = page_content(records, contents, launches, others=experiment is None)
    if not content["sections"]:
        raise UserError(f"{records.output}: there are no records to report")
    if not experiment and not command.asks_for_all:
        print(f"the page covers everything in {records.output}: no +experiment is named")
    path = records.output / (f"report-{experiment}.html" if experiment else "report.html")
    write_atomic(path, page := as_html(content))
    print(*content["problems"], f"written: {path}, {len(page.encode()) / 1e3:,.0f} kB", sep="\n")
