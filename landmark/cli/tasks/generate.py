"""task=generate: print what follows a prompt, as it is generated."""

import sys
from typing import TYPE_CHECKING

from landmark.cli.command import Command
from landmark.experiment.evaluation import load_trained
from landmark.experiment.jobs import folder_of
from landmark.utils.progress import ProgressBar

if TYPE_CHECKING:
    from landmark.evaluation.generation import GenerationStatistics


def run(command: Command) -> None:
    """Print the text on standard output, then a line of statistics on standard error."""
    from landmark.evaluation.generation import GenerationStatistics, generate_text

    config, inputs = command.only_config(), command.runner.inputs
    model, tokenizer = load_trained(config, folder_of(config, inputs), inputs)
    statistics = GenerationStatistics()
    with ProgressBar("reading") as progress:
        pieces = generate_text(model, tokenizer, config, statistics, progress)
        print(next(pieces, ""), end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    print(_summary(statistics), file=sys.stderr)


def _summary(statistics: "GenerationStatistics") -> str:
    parts = [f"{statistics.tokens_read:,} tokens read in {statistics.seconds_reading:.1f} s"]
    if statistics.tokens_generated > 1:
        each = statistics.seconds_generating / (statistics.tokens_generated - 1)
        parts.append(f"{statistics.tokens_generated:,} generated, {1e3 * each:.1f} ms each")
    if "blocks_kept" in statistics.memory:
        kept, on_device = (statistics.memory[f"{name}bytes_kept"] / 1e6 for name in ("", "device_"))
        blocks = statistics.memory["blocks_kept"]
        parts.append(f"memory of {blocks:,} blocks, {kept:,.1f} MB, {on_device:,.1f} on the device")
    return "; ".join(parts)
