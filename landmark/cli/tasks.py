"""What `task` chooses: what is done with the rows of a command."""

import time
from collections.abc import Callable

from landmark.cli import overviews, tables, teaching, trained
from landmark.cli.command import Command

TASKS: dict[str, Callable[[Command], object]] = {
    **{"prepare": Command.prepare, "train": Command.train, "evaluate": lambda command: command.evaluate().check()},
    **{"chat": trained.chat, "generate": trained.generate, "inspect": trained.inspect},
    **{"dashboard": overviews.show_dashboard, "plan": overviews.show_plan, "status": overviews.show_status},
    **{"table": tables.show_records, "teach": teaching.teach},
}


def carry_on(command: Command) -> None:
    """Carry out the task of a command."""
    config = command.config
    if config.task != "auto":
        TASKS[config.task](command)
        return
    begun = time.monotonic()
    done = command.evaluate()
    if command.is_experiment and config.row is None:
        tables.show(command, done.records)
        total = sum(len(row.configs) for row in command.rows)
        minutes, seconds = divmod(round(time.monotonic() - begun), 60)
        duration = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        print(f"{done.made} of {total} rows evaluated now, the others read from records; {duration}")
    done.check()
