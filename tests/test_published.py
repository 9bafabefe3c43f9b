"""The numbers of README.md and of the pages of experiments stand in committed files, and follow new results."""

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "experiments").glob("*/README.md"))]
MEASURED = {  # columns of values, and of their errors
    "perplexity": "spread",
    "difference": "difference_error",
    "first_copy": "first_copy_spread",
    "second_copy": "second_copy_spread",
}
DERIVED = {  # of two rows that the file compares with a third
    ("0.8", "0.3"),  # in percent
    ("0.037", "0.005"),  # of the quickstart
}


def results(page: Path) -> set[Path]:
    """The CSV files that a page is about: those of its folder, and of the pages and files to which it has links."""
    text, folder = page.read_text(encoding="utf-8"), page.parent
    linked = [folder / link for link in re.findall(r"\]\(([^)#]+\.csv)\)", text)]
    pages = [folder, *(folder / link for link in re.findall(r"\]\(([^)#]+)README\.md[^)]*\)", text))]
    found = {file.resolve() for each in pages for file in (each / "results").glob("*.csv")}
    return found | {file.resolve() for file in linked if file.is_file()} | {*(ROOT / "docs").glob("quickstart.csv")}


def rows(files: set[Path]) -> list[dict[str, str]]:
    return [row for file in files for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines())]


def measured(files: set[Path]) -> Iterator[tuple[float, float]]:
    """Each value with its error; of a difference of losses also what it is in percent of perplexity."""
    for row in rows(files):
        for value, error in ((row.get(key), row.get(other)) for key, other in MEASURED.items()):
            if value and error:
                yield float(value), float(error)
        if row.get("difference_error"):
            nats, error = float(row["difference"]), float(row["difference_error"])
            yield from ((100 * math.expm1(each), 100 * math.exp(each) * error) for each in (nats, -nats))
    for file in (file.with_suffix(".md") for file in files):
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for nats, errors in re.findall(r"\(([+-][\d.]+) nats a token; ([^)]*)", text):
            yield from ((float(nats), float(error)) for error in re.findall(r"± ([\d.]+)", errors))


def is_shown(number: str, value: float) -> bool:
    """Whether a value, without its sign, is rounded to this number."""
    digits = len(number.partition(".")[2])
    return abs(abs(value) - float(number)) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("page", PAGES, ids=[page.parent.name for page in PAGES])
def test_each_value_with_an_error_and_each_perplexity_of_a_table_is_that_of_a_row(page):
    text, files = page.read_text(encoding="utf-8"), results(page)
    known = list(measured(files))
    shown = set(re.findall(r"(\d*\.?\d+) ± (\d*\.?\d+)", text)) - DERIVED
    assert [pair for pair in shown if not any(all(map(is_shown, pair, each)) for each in known)] == []
    papers = rows({*(ROOT / "experiments").glob("*/paper.csv")})
    values = [float(row["perplexity"]) for row in rows(files) if row.get("perplexity")]
    values += [float(row[key]) for row in papers for key in ("perplexity_paper", "perplexity_poster") if row.get(key)]
    values += [error for _, error in known]
    lines = [line for line in text.splitlines() if " | " in line and (page.parent != ROOT or "perplexity" in line)]
    table = {number for line in lines for number in re.findall(r"(?<![\d.,])(\d+\.\d\d)(?![\d.])", line)}
    lost = [each for each in table if float(each) >= 5 and not any(is_shown(each, value) for value in values)]
    assert lost == []


def test_a_number_that_no_row_has_is_found():
    files = results(ROOT / "experiments" / "table1_pg19" / "README.md")
    assert any(is_shown("22.46", value) and is_shown("0.17", error) for value, error in measured(files))
    assert not any(is_shown("22.46", value) and is_shown("0.29", error) for value, error in measured(files))
