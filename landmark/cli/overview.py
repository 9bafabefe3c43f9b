"""Tasks that look over experiments, and make nothing for them: report and status."""

import shlex

from landmark.config import Config, rows
from landmark.config.composer import parse
from landmark.config.rows import Row
from landmark.experiment import identity, survey
from landmark.experiment import status as statuses
from landmark.experiment.runner import Workshop
from landmark.results.page import as_html, page_content
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic


def report(config: Config, selected: list[Row], workshop: Workshop, composer: rows.Compose) -> None:
    """Write one HTML file of all experiments with a record, or of one of them.

    Raises UserError where there is nothing to show, or a setting that would not be heard.
    """
    one = rows.named(config)
    _refuse_settings(config, selected, *(["experiment"] if one else []))
    shelf = survey.Shelf.read(workshop.records)
    launches = list(survey.launches(shelf, composer, config.name if one else None))
    content = page_content(shelf, launches, others=not one)
    if not content["sections"]:
        raise UserError(f"{workshop.records.output}: there are no records to report")
    path = workshop.output / (f"report-{config.name}.html" if one else "report.html")
    write_atomic(path, page := as_html(content))
    print(*content["problems"], f"written: {path}, {len(page.encode()) / 1e3:,.0f} kB", sep="\n")


def status(config: Config, selected: list[Row], workshop: Workshop, composer: rows.Compose, command: str) -> None:
    """Print what is done, running, failed or missing, and the command that does the rest; make nothing.

    command: that of the experiment that is named. Raises UserError as `report`.
    """
    states = statuses.Statuses(workshop.records)
    if rows.named(config):
        launch = survey.Launch(config, [], selected, {row.name: _entries(row, workshop) for row in selected})
        print(statuses.report(launch, states.of(launch), command))
        return
    _refuse_settings(config, selected)
    shelf = survey.Shelf.read(workshop.records)
    launches = list(survey.launches(shelf, composer))
    for launch in launches:
        print(statuses.report(launch, states.of(launch), brief=True))
    print(*shelf.damaged, sep="\n", end="\n" if shelf.damaged else "")
    new = sorted(set(survey.experiments()) - {launch.name for launch in launches})
    print(f"not begun: {', '.join(new)}; python run.py +experiment=NAME begins one")


def _entries(row: Row, workshop: Workshop) -> list[survey.Entry]:
    """What there is of a row with the corpus and the tokenizer that are here."""
    entries = []
    for one in row.configs:
        if workshop.prepared(one) is None:
            entries.append(survey.Entry(row.name, one, None, None, None, None))
            continue
        run = identity.digest(workshop.run_settings(one))
        made = identity.digest(workshop.row_settings(one))
        trained, record = workshop.records.find("runs", run), workshop.records.find("rows", made)
        entries.append(survey.Entry(row.name, one, run, made, trained, record))
    return entries


def _refuse_settings(config: Config, selected: list[Row], *also: str) -> None:
    """Raise UserError where a setting was given that a task over all experiments would leave unheard."""
    heard = ("task", "output", "logger", "trainer", *also)
    for override in [] if rows.named(config) and not also else parse(_given(config, selected)):
        if override.key_or_group.partition(".")[0] not in heard:
            raise UserError(
                f"task={config.task} is of every setting that was launched: leave out {override.input_line}"
                + ("" if also else ", or name an +experiment")
            )


def _given(config: Config, selected: list[Row]) -> list[str]:
    """The command line's overrides: of a row, those before its own."""
    texts = rows.named(config)
    own = len(shlex.split(texts[selected[0].name])) if texts else 0
    return selected[0].overrides[: len(selected[0].overrides) - own]
