"""A table and a picture of the lines of a run on a GPU: `python -m benchmarks.gpu.table FILE.jsonl`.

They are written beside the file. Where an item was done several times, its last time counts.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.journal import Line, lines_of
from benchmarks.gpu.kernels import CUDNN, FLASH, FLEX, OURS, PAIR, PASSES
from landmark.experiment.results.charts import COLOURS, Look, beside_names, dot, png, reference
from landmark.utils.data_frames import aligned
from landmark.utils.files import write_atomic

WINDOWS = re.compile(r"(d=\d+, W=\d+, T=\d+.*), (\w+)")  # of `Shape` and a pass
LOOKS = {
    OURS: Look(COLOURS["landmark"]),
    PAIR: Look(COLOURS["landmark"], "diamond", filled=False),
    CUDNN: Look(COLOURS["transformer"], "square", filled=False),
    FLEX: Look(COLOURS["transformer_xl"], "triangle-up"),
}


def main(words: Sequence[str]) -> int:
    """Write both. Returns the exit status."""
    if len(words) != 1:
        print("error: name one file: python -m benchmarks.gpu.table FILE.jsonl", file=sys.stderr)
        return 1
    path = Path(words[0])
    lines = lines_of(path)
    write_atomic(path.with_suffix(".md"), as_markdown(lines))
    write_atomic(path.with_suffix(".png"), as_picture(lines))
    return 0


def last_of_each(lines: Iterable[Line]) -> list[Line]:
    """The lines of each item's last attempt, items in the order in which they were first begun."""
    found: dict[str, list[Line]] = {}
    begun: dict[str, list[Line]] = {}
    for line in lines:
        if "item" not in line:
            continue
        begun.setdefault(line["item"], []).append(line)
        if line["kind"] == "item":
            attempt = begun.pop(line["item"])
            if line["status"] != "left out" or line["item"] not in found:
                found[line["item"]] = attempt
    return [line for attempt in found.values() for line in attempt]


def as_markdown(lines: Sequence[Line]) -> str:
    """Where the numbers come from, the checks in a line, and tables of the times."""
    calls = [line for line in lines if line["kind"] == "call"]
    last = last_of_each(lines)
    checks = [line for line in last if line["kind"] == "check"]
    wrong = [f"{line['item']}: {line['what']}" for line in checks if not line["ok"]]
    times = [line for line in last if line["kind"] == "time"]
    parts = [
        "\n".join(f"- {_origin(call)}" for call in calls),
        f"Checks: {len(checks) - len(wrong)} of {len(checks)} right." + "".join(f"\n- wrong: {each}" for each in wrong),
        "Ratios are of the time of flash SDPA; in brackets milliseconds, and TFLOP/s of causal attention.",
        _windows([line for line in times if _is_window(line)]),
        "Other timings, medians in milliseconds: of the device, and of the host until all is launched.",
        _others([line for line in times if not _is_window(line)]),
    ]
    left = [f"- {line['item']}: {line.get('error', line['status'])}" for line in last if _is_undone(line)]
    return "\n\n".join([*parts, *(["Not measured:", "\n".join(left)] if left else [])]) + "\n"


def _origin(call: Line) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in call["versions"].items() if version)
    gpus = ", ".join(call["hardware"].get("gpus", ["no GPU"]))
    return f"{gpus}; {versions}; commit {call['commit']}; {call['time']}; `{call['command']}`"


def _is_window(line: Line) -> bool:
    found = WINDOWS.fullmatch(line["setting"])
    return found is not None and found[2] in PASSES and line["against"] == FLASH


def _is_undone(line: Line) -> bool:
    return line["kind"] == "item" and line["status"] != "ok"


def _windows(times: Sequence[Line]) -> str:
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for line in times:
        shape, done = WINDOWS.fullmatch(line["setting"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        found.setdefault((shape, line["measured"]), {})[done] = line
    rows = []
    for (shape, measured), passes in found.items():
        cells = [f"{x['ratio'][0]:.2f} ({x['device_ms'][0]:.2f} ms, {x['tflops']:.0f})" for x in passes.values()]
        rows.append([shape, measured, *cells, _target(passes.get("both", {}))])
    return aligned(["windows", "kernel", *PASSES, "target"], rows, len(PASSES) + 3, "pipe")


def _target(line: Line) -> str:
    return f"{line['target']}: {'met' if line['met'] else 'missed'}" if "target" in line else ""


def _others(times: Sequence[Line]) -> str:
    titles = ["setting", "measured", "device", "host", "ratio", "of", "target"]
    rows = []
    for line in times:
        device, host, ratio = (f"{line[name][0]:.3g}" for name in ("device_ms", "host_ms", "ratio"))
        rows.append([line["setting"], line["measured"], device, host, ratio, line["against"], _target(line)])
    return aligned(titles, rows, len(titles), "pipe")


def as_picture(lines: Sequence[Line]) -> bytes:
    """A PNG: the time of forward and backward of each shape, by that of flash attention."""
    times = [line for line in last_of_each(lines) if line["kind"] == "time" and _is_window(line)]
    gpu = next(line for line in lines if line["kind"] == "call")["hardware"].get("gpus", ["CPU"])[0]
    both = [line for line in times if line["setting"].endswith(", both") and line["measured"] in LOOKS]
    points = [
        dot(line["measured"], line["setting"].removesuffix(", both"), line["ratio"][0], tuple(line["ratio"][1:]))
        for line in both
    ]
    looks = {name: look for name, look in LOOKS.items() if any(line["measured"] == name for line in both)}
    names = list(dict.fromkeys(line["setting"].removesuffix(", both") for line in both))
    x = {"title": "time of flash SDPA = 1", "scale": {"zero": True}}
    panel = beside_names("forward and backward", points, looks, names, x, below=[reference(x=1)])
    return png(f"Attention of training windows on one {gpu}, bfloat16", [[panel]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
