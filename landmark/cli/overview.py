"""What can be launched: experiments, tasks, examples. The command shows it when it is given nothing to do."""

import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path

from landmark.config import Config
from landmark.config.command_line import program
from landmark.config.schema import TASKS
from landmark.utils.files import open_written
from landmark.utils.source_tree import CONF

EXAMPLES = {
    "+experiment=quickstart": "minutes on two CPU cores, no download",
    "+experiment=quickstart task=plan": "its runs and rows, and what they cost here",
    "+experiment=table1_pg19 size=nano tokenizer=gpt2_1024 data.path=DIR": "a table of the paper, small, books in DIR",
    "task=status": "what has been done so far",
    "task=generate run=latest prompt_file=FILE": "the last model continues a text",
    "--help": "this page, and every setting with its default",
}
_GROUPS = {"paper": "The paper", "beyond": "Beyond the paper", "check": "Checks of this program"}  # `about`


def experiments(own: Path | None = None) -> dict[str, dict[str, str]]:
    """The first sentence on each experiment, by the group that its `about` names, and by its name.

    own: a folder of settings besides those of the package.
    """
    files = [file for folder in (CONF, own) if folder for file in sorted((folder / "experiment").glob("*.yaml"))]
    texts = {}
    for file in files:
        with open_written(file, "name another --config-dir") as content:
            texts[file.stem] = content.read().decode(errors="replace")
    about = {name: re.search(r"^about: *(\w+)", text, re.MULTILINE) for name, text in texts.items()}
    groups = {name: found[1] if found else Config.about for name, found in about.items()}
    return {
        key: {name: _first_sentence(text) for name, text in texts.items() if groups[name] == key} for key in _GROUPS
    }


def overview(own: Path | None = None) -> str:
    """The page. own: as for `experiments`."""
    said = {f"task={name}": text for name, text in sorted(TASKS.items())}
    first = shlex.join(program())
    groups = experiments(own)
    width = max((len(f"+experiment={name}") for group in groups.values() for name in group), default=0)
    listed = []
    for key, group in groups.items():
        if group:
            named = {f"+experiment={name}": text for name, text in group.items()}
            listed += [f" {_GROUPS[key]}:", *_lines(named, width)]
    return "\n".join(
        [
            f"{first} trains and evaluates models with landmark attention. Name an experiment or a task:",
            *("", "Experiments (each trains what is missing, evaluates its rows and writes a table):", *listed),
            *("", "Tasks (in place of training and evaluating):", *_lines(said)),
            *("", "Examples:", *_lines({f"{first} {words}": text for words, text in EXAMPLES.items()})),
        ]
    )


def _lines(texts: Mapping[str, str], width: int = 0) -> list[str]:
    width = max([width, *map(len, texts)])
    return [f"  {name:<{width}}  {text}".rstrip() for name, text in texts.items()]


def _first_sentence(text: str) -> str:
    comments = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            comments.append(line.lstrip("# "))
    sentence = re.split(r"(?<=[.?])\s", " ".join(comments), maxsplit=1)[0].removesuffix(".")
    return textwrap.shorten(sentence, 90, placeholder=" …")
