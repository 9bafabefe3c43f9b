"""Speed and memory against peers: `python -m benchmarks`, or `make benchmark`."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import data, growth, pictures, report
from benchmarks.exactness import Inexact
from benchmarks.parts import PARTS, in_own_process, measure
from benchmarks.report import Report
from benchmarks.settings import Options
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic

RESULTS = Path(__file__).parent / "results"


def main(words: Sequence[str]) -> int:
    """Measure, print the table, and write it with the picture. Returns the exit status."""
    arguments = parse(words)
    options = Options(arguments.quick, arguments.text, arguments.ranks)
    run_part = measure if options.quick else in_own_process
    started = time.time()
    try:
        if "data" in arguments.only:
            data.check_files(options)
        reports = {part: run_part(part, options, started) for part in arguments.only}
    except (Inexact, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    whole = Report(
        [row for each in reports.values() for row in each.rows],
        [note for each in reports.values() for note in each.notes],
    )
    partly = [] if list(reports) == list(PARTS) else list(reports)
    name = "-".join([report.stem(), *partly])
    written = report.write(whole, arguments.out, name, shlex.join(["python", "-m", "benchmarks", *words]))
    if "growth" in reports:
        written.append(arguments.out / f"{name}.png")
        title = f"{growth.scale(options.quick)}; {report.machine()}"
        write_atomic(written[-1], pictures.draw(reports["growth"].rows, title))
    print(f"\n{report.as_text(whole)}\nwritten: {', '.join(map(str, written))}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=parts, default=list(PARTS), metavar="PART,…", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few runs, to check that everything works")
    parser.add_argument("--text", type=Path, metavar="DIR", help="text to tokenise (default: Python's library)")
    parser.add_argument("--ranks", type=Path, metavar="FILE", help="GPT-2's ranks (gpt2.tiktoken), for tokenising")
    return parser.parse_args(words)


def parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [part for part in chosen if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return [part for part in PARTS if part in chosen]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
