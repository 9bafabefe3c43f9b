"""task=prepare: tokenise the corpora of the rows."""

from landmark.cli.command import Command


def run(command: Command) -> None:
    """Prepare each corpus once and print its folder and sizes."""
    seen = set()
    for row in command.rows:
        for config in row.configs:
            corpus = command.runner.inputs.corpus(config)
            if corpus.folder not in seen:
                seen.add(corpus.folder)
                splits = corpus.manifest["splits"].items()
                sizes = ", ".join(f"{name} {split['tokens']:,} tokens" for name, split in splits)
                print(f"{corpus.folder}: {sizes or 'nothing to prepare'}")
