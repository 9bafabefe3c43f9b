"""Kill tables at random moments: `python -m benchmarks.survival --kills 50`."""

import argparse
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from benchmarks.survival.soak import ROUND, Kill, killed_table, undisturbed
from benchmarks.survival.victim import STAGES
from landmark.experiment.records import provenance
from landmark.utils.data_frames import aligned, csv_text
from landmark.utils.files import write_atomic
from landmark.utils.hardware import hardware

RESULTS = Path(__file__).parent / "results"


def main(words: Sequence[str]) -> int:
    """Kill tables, print and write the outcome. Returns 0 if nothing was lost, else 1."""
    arguments = parse(words)
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        kills, differing = soak(Path(work), arguments.kills, arguments.seed)
    command = shlex.join(["python", "-m", "benchmarks.survival", *words])
    name = f"nano-{hardware()['cores']}-core-cpu"
    text = as_markdown(kills, differing, command)
    write_atomic(arguments.out / f"{name}.csv", as_csv(kills, command))
    write_atomic(arguments.out / f"{name}.md", text)
    print(f"{text}\nwritten: {arguments.out / name}.csv, {arguments.out / name}.md")
    return int(lost(kills, differing))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="number of kills (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for the tables (default: a temporary one)")
    return parser.parse_args(words)


def soak(work: Path, count: int, seed: int) -> tuple[list[Kill], list[list[str]]]:
    """Kill tables `count` times. Returns the kills, and for each table its differences from the reference."""
    chance, kills, differing = random.Random(seed), list[Kill](), list[list[str]]()
    reference = undisturbed(work / "reference")
    with tqdm(total=count, unit="kill", desc="survival") as bar:
        while len(kills) < count:
            table = len(differing) + 1
            stages = ROUND[: count - len(kills)]
            for found in killed_table(work / f"table{table}", stages, reference, chance, table):
                if isinstance(found, Kill):
                    kills.append(found)
                    bar.set_postfix_str(f"table {table}, {found.stage}", refresh=False)
                    bar.update()
                else:
                    differing.append(found)
    return kills, differing


def lost(kills: Sequence[Kill], differing: Sequence[Sequence[str]]) -> bool:
    """Whether a kill left a wrong record or a lock, or a table differs from the reference."""
    return any(differing) or any(kill.wrong_records or kill.locks_held for kill in kills)


def as_csv(kills: Sequence[Kill], command: str) -> str:
    found = provenance()
    origin = {"commit": found["commit"], "command": command, "time": found["time"]}
    return csv_text([{"kill": number} | asdict(kill) | origin for number, kill in enumerate(kills, 1)])


def as_markdown(kills: Sequence[Kill], differing: Sequence[Sequence[str]], command: str) -> str:
    """A table of the kills by stage, and the losses."""
    found = provenance()
    titles = ["killed in", "kills", "seconds after the start", "wrong records", "locks held", "temporary files left"]
    rows = []
    for stage in [*STAGES, "between stages"]:
        if those := [kill for kill in kills if kill.stage == stage]:
            spread = f"{min(kill.seconds for kill in those):.1f} to {max(kill.seconds for kill in those):.1f}"
            left = zip(*((kill.wrong_records, kill.locks_held, kill.temporary_files) for kill in those))
            rows.append([stage, str(len(those)), spread, *(str(sum(each)) for each in left)])
    same = sum(not each for each in differing)
    lines = [
        aligned(titles, rows, 1, "pipe"),
        "",
        f"{len(kills)} kills of {len(differing)} tables; {same} of them ended as the undisturbed one, bit",
    ]
    lines[-1] += " for bit: tokens, weights, metrics, records and table, except timings; nothing else was left."
    lines += [f"- table {number}: {', '.join(each)}" for number, each in enumerate(differing, 1) if each]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("python", "torch"))
    measured = f"Measured at commit {(found['commit'] or 'unknown')[:10]} on {found['hardware']['cores']} cores"
    return "\n".join([*lines, "", f"{measured} ({versions}) by `{command}`."]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
