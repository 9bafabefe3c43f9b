"""The rows of a benchmark, as a table, CSV and Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.settings import THREADS
from benchmarks.timing import Spread, ratios
from landmark.utils.data_frames import aligned, csv_text
from landmark.utils.files import write_atomic
from landmark.utils.hardware import hardware

VERSIONS = ("python", "torch", "triton", "landmark", "tiktoken")
COLUMNS = ("part", "setting", "measured", "against", "value", "unit", "ratio", "target", "")


@dataclass(frozen=True)
class Target:
    """A bound on a ratio."""

    sense: str  # ≤ or ≥
    bound: float

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"

    def met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.sense == "≤" else ratio >= self.bound


@dataclass(frozen=True)
class Row:
    """One competitor in one setting: its value, and the ratio to the competitor that it is compared with."""

    part: str
    setting: str
    measured: str
    against: str
    unit: str
    value: Spread
    ratio: Spread
    target: Target | None = None
    context: int | None = None  # tokens read before, if they vary

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "met" if self.target.met(self.ratio.median) else "missed"

    def plain(self) -> dict[str, Any]:
        """Values by column of the CSV."""
        return {
            "part": self.part,
            "setting": self.setting,
            "measured": self.measured,
            "against": self.against,
            "unit": self.unit,
            "value": self.value.median,
            "value_low": self.value.low,
            "value_high": self.value.high,
            "ratio": self.ratio.median,
            "ratio_low": self.ratio.low,
            "ratio_high": self.ratio.high,
            "runs": self.value.runs,
            "context": self.context or "",
            "target": self.target or "",
            "verdict": self.verdict,
        }

    def cells(self) -> list[str]:
        ratio = "1" if self.measured == self.against else _spread(self.ratio)
        target = "" if self.target is None else str(self.target)
        against = "" if self.measured == self.against else self.against
        value = _spread(self.value)
        return [self.part, self.setting, self.measured, against, value, self.unit, ratio, target, self.verdict]


@dataclass(frozen=True)
class Report:
    """Rows, and notes such as a part that could not be measured."""

    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def compare(
    part: str,
    setting: str,
    unit: str,
    values: Mapping[str, Sequence[float]],
    against: str,
    targets: Mapping[str, Target] | None = None,
) -> list[Row]:
    """A row for each competitor.

    Args:
        part: of the benchmark.
        setting: what was measured, in words.
        unit: of the values.
        values: by competitor, one for each round; a ratio compares values of one round.
        against: the competitor that the others are compared with.
        targets: bounds on the ratios, by competitor. None: none.
    """
    return [
        Row(
            part=part,
            setting=setting,
            measured=name,
            against=against,
            unit=unit,
            value=Spread.of(each),
            ratio=ratios(each, values[against]),
            target=None if targets is None else targets.get(name),
        )
        for name, each in values.items()
    ]


def per_second(tokens: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [tokens / each for each in values] for name, values in seconds.items()}


def milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [1e3 * each for each in values] for name, values in seconds.items()}


def megabytes(num_bytes: Mapping[str, int]) -> dict[str, list[float]]:
    return {name: [each / 1e6] for name, each in num_bytes.items()}


def source(command: str) -> dict[str, str]:
    """The origin of the numbers, by column of the CSV. Hydra is imported here: a target needs none."""
    from landmark.experiment.runs.records import provenance

    found = provenance()
    versions = found["versions"]
    return {
        "hardware": machine(),
        "versions": ", ".join(f"{name} {versions[name]}" for name in VERSIONS if versions[name]),
        "commit": found["commit"] or "unknown",
        "command": command,
        "time": found["time"],
    }


def machine() -> str:
    found = hardware()
    on_cpu = f"{found['cpu']}, {found['cores']} cores, {THREADS} threads"
    return f"{found['gpus'][0]}, {on_cpu}" if found.get("gpus") else on_cpu


def stem() -> str:
    """File name for this hardware, such as 2-core-cpu."""
    return f"{hardware()['cores']}-core-cpu"


def gpu_stem() -> str:
    """File name for this GPU, such as nvidia-h200; for the CPU if there is none."""
    gpus = hardware().get("gpus")
    return "-".join(gpus[0].lower().split()) if gpus else stem()


def as_text(report: Report) -> str:
    return "\n".join([_table(report, "simple"), "", _LEGEND, *report.notes]) + "\n"


def as_markdown(report: Report, origin: Mapping[str, str]) -> str:
    where = f"Measured at commit {origin['commit'][:10]} on {origin['hardware']} ({origin['versions']})"
    lines = [_table(report, "pipe"), "", _LEGEND, "", *report.notes, f"{where} by `{origin['command']}`."]
    return "\n".join(lines) + "\n"


def _table(report: Report, form: str) -> str:
    return aligned(COLUMNS, [row.cells() for row in report.rows], len(COLUMNS), form)


def write(report: Report, folder: Path, name: str, command: str) -> list[Path]:
    """Write the table as CSV and as Markdown. Returns the paths."""
    origin = source(command)
    paths = [folder / f"{name}.{kind}" for kind in ("csv", "md")]
    write_atomic(paths[0], csv_text([row.plain() | origin for row in report.rows]))
    write_atomic(paths[1], as_markdown(report, origin))
    return paths


_LEGEND = "value, ratio: median (quartiles) of several runs; ratios are taken round by round"


def _spread(spread: Spread) -> str:
    if spread.runs == 1:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.low)}–{_number(spread.high)})"


def _number(value: float) -> str:
    """The number with three digits, or its whole part if that has more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 0.01 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
