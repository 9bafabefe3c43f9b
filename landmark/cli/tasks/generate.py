"""task=generate: print what follows a prompt, as it is generated."""

import sys
from typing import TYPE_CHECKING

from landmark.cli.command import Command
from landmark.experiment.evaluation import load_trained
from landmark.experiment.jobs import folder_of
from landmark.utils.progress import ProgressBar

if TYPE_CHECKING:
    from landmark.evaluation.asking import Account


def run(command: Command) -> None:
    """Print the text on standard output, then a line of statistics on standard error."""
    from landmark.evaluation.asking import Account, answer

    config, inputs = command.only_config(), command.runner.inputs
    model, tokenizer = load_trained(config, folder_of(config, inputs), inputs)
    account = Account()
    with ProgressBar("reading") as progress:
        pieces = answer(model, tokenizer, config, account, progress)
        print(next(pieces, ""), end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    print(_summary(account), file=sys.stderr)


def _summary(account: "Account") -> str:
    parts = [f"{account.tokens_read:,} tokens read in {account.seconds_reading:.1f} s"]
    if account.tokens_generated > 1:
        each = account.seconds_generating / (account.tokens_generated - 1)
        parts.append(f"{account.tokens_generated:,} generated, {1e3 * each:.1f} ms each")
    if "blocks_kept" in account.stats:
        kept, on_device = (account.stats[f"{name}bytes_kept"] / 1e6 for name in ("", "device_"))
        blocks = account.stats["blocks_kept"]
        parts.append(f"memory of {blocks:,} blocks, {kept:,.1f} MB, {on_device:,.1f} on the device")
    return "; ".join(parts)
