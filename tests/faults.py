"""Bad settings and damaged files, drawn at random: none may end in a traceback, or with another number.

python -m tests.faults COUNT [SEED]     # tries so many of each, and prints those that do
"""

import contextlib
import io
import json
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig

from landmark.cli.terminal import said
from tests.configurations import compose_conf
from tests.workplace import Workplace, write_books

VALUES = ("nan", "inf", "-inf", "-1", "0", "1e30", "99999999999999999999", "''", "null", "[]", "[null]", "{}", "true")
VALUES += ("[nan]", "[-1]", "'\udcff'", "nope", "${nope}", "${size}", "???", "0.5", "'a/../b'", "[0,0]", "{a: 1}")
MODELS = ("landmark", "transformer", "transformer_xl")
COMMANDS = (["task=report"], ["task=status"], ["+experiment=quickstart", "data=pg19", "row=plain_512"])


def keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration."""
    for key in config:
        yield f"{prefix}{key}"
        if isinstance(config._get_node(key), DictConfig) and not config._get_node(key)._is_none():  # pyright: ignore
            yield from keys(config[key], f"{prefix}{key}.")


def bad_settings(draw: random.Random, count: int) -> list[list[str]]:
    every = [key for key in keys(compose_conf([])) if key not in ("output", "data.cache", "data.path")]
    return [
        [
            f"model={draw.choice(MODELS)}",
            f"{draw.choice(every)}={draw.choice(VALUES)}",
            *draw.choice(([], ["task=plan"])),
        ]
        for _ in range(count)
    ]


def damage(draw: random.Random, content: bytes) -> bytes:
    """The content of a file after a fault of a disk or of a hand."""

    def edited() -> bytes:
        value = json.loads(content)
        at = value
        while isinstance(at, dict) and at:
            key = draw.choice(sorted(at))
            if not isinstance(at[key], dict) or not at[key] or draw.random() < 0.4:
                if draw.random() < 0.3:
                    del at[key]
                else:
                    at[key] = draw.choice((None, [], {}, 3, -1, "text", True))
                break
            at = at[key]
        return json.dumps(value).encode()

    def flipped() -> bytes:
        changed = bytearray(content)
        for _ in range(draw.choice((1, 100))):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)

    kinds: list[Callable[[], bytes]] = [lambda: b"", lambda: content[: draw.randrange(len(content))], flipped]
    kinds += [lambda: bytes(len(content)), lambda: draw.choice((b"null", b"[]", b"3", b'"text"', b"{}"))]
    if content.startswith(b"{"):
        kinds += [edited] * 4
    return draw.choice(kinds)()


def fault(run: Callable[[], object], perplexity: str | None = None) -> str | None:
    """The traceback or wrong perplexity in which a command ends; None where it ends well, or in one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            run()
    except SystemExit:
        return None
    except Exception as error:
        return None if said(error) is not None else traceback.format_exc()
    wrong = {*re.findall(r"perplexity ([\d.]+)", printed.getvalue())} - {perplexity}
    return f"perplexity {', '.join(wrong)} instead of {perplexity}" if perplexity and wrong else None


def faults_of_settings(work: Workplace, draw: random.Random, count: int) -> dict[str, str]:
    found = {}
    for overrides in bad_settings(draw, count):
        if (trace := fault(lambda: work(*overrides))) is not None:  # noqa: B023
            found[" ".join(overrides)] = trace
    return found


def faults_of_files(work: Workplace, draw: random.Random, count: int) -> dict[str, str]:
    """work: where the commands have left no files yet."""
    work(*COMMANDS[-1])
    (record,) = work.output.glob("records/rows/*.json")
    perplexity = f"{json.loads(record.read_text())['results']['perplexity']:.2f}"
    whole = work.output.with_name("whole")
    shutil.copytree(work.output, whole)
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*.json")) + sorted(whole.rglob("*.csv"))]
    found = {}
    for _ in range(count):
        name, command = draw.choice(files), draw.choice(COMMANDS)
        changed = damage(draw, (whole / name).read_bytes())
        (work.output / name).write_bytes(changed)
        given = work.common if command is COMMANDS[-1] else [f"output={work.output}"]
        if (trace := fault(lambda: work.task(*given, *command), perplexity)) is not None:  # noqa: B023
            found[f"{name} {changed[:200]!r} {command}"] = trace
        shutil.rmtree(work.output)
        shutil.copytree(whole, work.output)
    return found


def main(count: int, seed: int) -> None:
    folder, draw = Path(tempfile.mkdtemp()), random.Random(seed)
    books = folder / "books"
    books.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        work = Workplace(write_books(books), folder / "outputs", patch)
        found = faults_of_files(work, draw, count) | faults_of_settings(work, draw, count)
    for case, trace in found.items():
        print(f"=== {case}\n{trace}")
    print(f"{len(found)} of {2 * count} ended in a traceback or with a wrong number; seed {seed}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else random.randrange(10**6))
