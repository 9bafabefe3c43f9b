"""Probes from the command line to their tables and pictures, with models too small to learn anything."""

import csv
import math
import re

import numpy as np
import pytest

from landmark.experiment.records import Records
from landmark.results import render, tables
from tests.workplace import run_task

TINY = [
    *("size=nano", "tokenizer=bytes", "trainer=cpu", "trainer.threads=1", "logger=csv", "name=look_back"),
    *("model.num_layers=2", "model.num_heads=2", "model.head_dim=4", "model.mlp_dim=8"),
    *("train.steps=2", "train.batch_size=1", "train.length=102", "train.validate_every=2", "train.validate_batches=1"),
]
ROWS = {
    "plain_96": "model=transformer eval.task=copy eval.length=96 eval.prompts=6",
    "landmark_96": "model=landmark eval.task=copy eval.length=96 eval.prompts=6",
    "landmark_240": "model=landmark eval.task=copy eval.length=240 eval.local=60 retrieval.k=2 eval.prompts=6",
    "once_96": "model=landmark eval.task=copy eval.length=96 eval.prompts=1",
    "books_96": "model=landmark eval.length=96 eval.tokens=4096",
}
COMPARE = {"same": "landmark_96,plain_96", "longer": "landmark_240,landmark_96", "other": "landmark_96,books_96"}


def start(books, output, *given):
    rows = [f"+rows.{name}='{row}'" for name, row in ROWS.items()]
    compare = [f"+compare.{title}=[{pair}]" for title, pair in COMPARE.items()]
    run_task(*TINY, f"data.path={books}", f"output={output}", *rows, *compare, *given)


@pytest.fixture(scope="module")
def output(books, tmp_path_factory):
    """The records, tables and pictures of all rows."""
    folder = tmp_path_factory.mktemp("probes")
    start(books, folder)
    return folder


@pytest.fixture(scope="module")
def records(output):
    return {record["labels"]["row"]: record for record in Records(output).read_all().rows.values()}


def test_all_rows_share_two_trainings_and_a_known_probe_is_read_from_its_record(books, output, records, capsys):
    assert records.keys() == ROWS.keys()
    assert len(Records(output).read_all().runs) == 2
    start(books, output)
    said = capsys.readouterr().out
    assert "0 of 5 rows evaluated now" in said
    assert re.search(r"plain_96: first copy \d\.\d{4} ± \S+, second copy \d\.\d{4} ± \S+, from its record", said)


def test_a_record_has_the_probe_and_its_sums_and_several_seeds_a_mean_and_a_deviation(records):
    copy = records["landmark_240"]
    assert (copy["settings"]["probe"], copy["settings"]["prompts"]) == ("copy", 6)
    assert [tokens for _, tokens, _ in copy["results"]["segments"]] == [119] * 6
    assert copy["results"]["perplexity"] == pytest.approx(math.exp(copy["results"]["nll"]))
    assert copy["results"]["memory"]["retrievals"] > 0
    assert records["once_96"]["results"]["second_copy_se"] is None  # of one segment
    assert [name for name, record in records.items() if "copy_map" in record["results"]] == ["landmark_240"]
    assert np.shape(copy["results"]["copy_map"]["best"]) == (5, 5)  # 239 tokens read, in blocks of 50

    def seed(**results):
        return records["landmark_96"] | {"results": records["landmark_96"]["results"] | results}

    shares = [seed(accuracy=share, accuracy_low=0.0, accuracy_high=1.0) for share in (0.2, 0.3, 0.4)]
    row = tables.build("t", {"a": shares}).rows[0]
    assert (row.accuracy, row.accuracy_low, row.accuracy_high) == pytest.approx((0.3, 0.2, 0.4))
    row = tables.build("t", {"a": [seed(second_copy=nats, first_copy=4.0) for nats in (1.0, 2.0)]}).rows[0]
    assert (row.second_copy, row.second_copy_spread) == pytest.approx((1.5, 0.5**0.5))
    assert row.first_copy_spread == 0


def test_each_column_is_shown_of_the_rows_that_have_it_and_rows_of_the_same_stretches_are_compared(output, records):
    with open(next(output.glob("tables/look_back/*.csv")), newline="", encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    results = records["plain_96"]["results"]
    assert float(rows["plain_96"]["first_copy"]) == results["first_copy"]
    assert float(rows["plain_96"]["second_copy_spread"]) == results["second_copy_se"]
    assert rows["plain_96"]["accuracy"] == rows["books_96"]["second_copy"] == ""
    for names, shown in ((["plain_96", "once_96"], {"first copy, nats", "second copy, nats"}), (["books_96"], set())):
        table = tables.build("t", {name: [records[name]] for name in names})
        titles = render.columns(table)
        cells, titles = render.cells(table, titles), list(titles.values())
        assert {"first copy, nats", "second copy, nats"} & set(titles) == shown
        assert all(cell != "-" for name in shown for cell in [cells[0][titles.index(name)]])
    text = next(output.glob("tables/look_back/*.md")).read_text(encoding="utf-8")
    assert re.search(r"same: landmark_96 is .* paired over 6 stretches of text", text)
    assert "longer: landmark_240 and landmark_96 were not measured on the same text" in text
    assert "other: landmark_96 and books_96 were not measured on the same text" in text
