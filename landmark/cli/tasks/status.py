"""task=status: print what is done, running, stopped, failed or missing, and the command that makes the rest."""

import shlex

from landmark.cli.command import Command
from landmark.cli.overview import experiments
from landmark.config.command_line import program
from landmark.experiment.launches import read_launches
from landmark.experiment.status import describe, free_states, states_of


def run(command: Command) -> None:
    """Of what the command line names, each run and row; else of all launches, what is not done. Makes nothing."""
    records = command.runner.records
    contents = records.read_all()
    if command.is_experiment or not command.asks_for_all:
        launch = command.planned_launch()
        print(describe(launch, states_of(launch, records, contents), command=command.suggest()))
        print(*contents.damaged, sep="\n", end="\n" if contents.damaged else "")
        return
    launches = read_launches(records, contents)
    for launch in launches:
        print(describe(launch, states_of(launch, records, contents), is_brief=True))
    for line in free_states(records, contents, launches):
        print(line)
    print(*contents.damaged, sep="\n", end="\n" if contents.damaged else "")
    known = {name for group in experiments().values() for name in group}
    new = sorted(known - {launch.experiment for launch in launches})
    print(f"not begun: {', '.join(new)}; {shlex.join(program())} +experiment=NAME begins one")
