"""task=generate: print what follows a prompt, as it is generated."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from landmark.cli.command import Command
from landmark.config import Config
from landmark.experiment.jobs import folder_of
from landmark.experiment.runner import load_trained
from landmark.utils.errors import UserError
from landmark.utils.progress import ProgressBar

if TYPE_CHECKING:
    from landmark.evaluation.generation import GenerationStatistics


def run(command: Command) -> None:
    """Print the text on standard output, then a line of statistics on standard error."""
    config, inputs = command.only_config(), command.runner.inputs
    check_files(config)
    folder = folder_of(config, inputs)
    from landmark.evaluation.generation import GenerationStatistics, generate_text

    model, tokenizer = load_trained(config, folder, inputs)
    statistics = GenerationStatistics()
    with ProgressBar("reading") as progress:
        pieces = generate_text(model, tokenizer, config, statistics, progress)
        print(next(pieces, ""), end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    if config.generate.tokens:
        print()
    print(_summary(statistics), file=sys.stderr)


def check_files(config: Config) -> None:
    """Raise UserError for files and folders that are missing, or in the way, before anything is loaded."""
    if config.prompt_file not in (None, "-") and not Path(config.prompt_file).exists():
        raise UserError(f"prompt_file={config.prompt_file}: there is no such file")
    if config.memory.load is not None and not Path(config.memory.load).is_dir():
        raise UserError(f"memory.load={config.memory.load}: there is no such folder")
    if config.memory.save is not None and Path(config.memory.save).exists():
        raise UserError(f"memory.save={config.memory.save}: exists already, delete it or name another folder")


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
