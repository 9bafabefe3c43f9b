"""task=status: print what is done, running, stopped or missing, and the command that makes the rest."""

import shlex

from landmark.cli.command import Command
from landmark.cli.overview import experiments
from landmark.config.command_line import program
from landmark.experiment.launches import describe, lines_of, rows_without_launch, states_of, unfinished


def run(command: Command) -> None:
    """Of what the command line names, each run and row; else of all launches, what is not done. Makes nothing."""
    records = command.runner.records
    contents = records.read_all()
    if command.is_experiment or not command.asks_for_all:
        launch = command.launch()
        print(describe(launch, states_of(launch, records, contents), command=command.suggest()))
        print(*contents.damaged, sep="\n", end="\n" if contents.damaged else "")
        return
    begun, told = set[str](), set[str]()
    launches = command.launches(contents)
    for launch in launches:
        states = states_of(launch, records, contents)
        begun.add(launch.experiment)
        told |= {each.title for each in states}
        print(describe(launch, states, is_brief=True))
    if rows := rows_without_launch(contents, launches):
        print(f"no experiment, or another one by now: {len(rows)} rows done")
    more = [(name, state) for name, state in unfinished(records, contents) if state.title not in told]
    for name in dict.fromkeys(name for name, _ in more):
        begun.add(name)
        print(f"{name}:", *lines_of([state for other, state in more if other == name]), sep="\n")
    print(*contents.damaged, sep="\n", end="\n" if contents.damaged else "")
    new = sorted({name for group in experiments().values() for name in group} - begun)
    print(f"not begun: {', '.join(new)}; {shlex.join(program())} +experiment=NAME begins one")
