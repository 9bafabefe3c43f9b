"""task=inspect: write a page that shows the blocks retrieved for each token of a text."""

from landmark.cli.command import Command
from landmark.experiment.jobs import folder_of
from landmark.experiment.runner import load_trained
from landmark.utils.progress import ProgressBar


def run(command: Command) -> None:
    """Write the page and print its path."""
    from landmark.inspector.page import inspect_text

    config, inputs = command.only_config(), command.runner.inputs
    folder = folder_of(config, inputs)
    model, tokenizer = load_trained(config, folder, inputs)
    with ProgressBar("reading") as progress:
        print(inspect_text(model, tokenizer, config, folder.name, command.runner.output, progress))
