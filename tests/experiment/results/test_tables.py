"""Tables in text, Markdown and CSV, and what they say of their rows."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from landmark.experiment.results import render
from landmark.experiment.results.columns import COLUMNS
from landmark.experiment.results.paper import read_paper
from landmark.experiment.results.tables import build, compare
from landmark.utils.significance import Error, Mean
from tests.configurations import row_record
from tests.experiment.results.made_up import beside_the_papers, composed

WRITTEN = Path(__file__).parent / "written"
CASES = {  # by the file that holds the table, and begins with its experiment: some of its rows, and overrides
    "table1_pg19": (slice(None), "seeds=[0,1]"),
    "table1_arxiv": (slice(None), "tokenizer=bytes"),  # rows without an error, in other tokens than the paper's
    "table3_cmt": (slice(None),),
    "table3_cmt.seeds": (("no_cmt", "cmt_0.2", "cmt_0.6"), "seeds=[0,1,2]"),
    "ablation_retrieval": (("rerank_512", "random_512", "sinks_512", "landmark_1024"),),  # each by a command
    "figure3_passkey": (slice(-4, None),),
    "figure5_unique_blocks": (slice(None),),
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_is_written_as_it_was_reviewed(case):
    """Byte for byte; the paper's numbers find their rows by the settings, whatever their order."""
    table = beside_the_papers(case.partition(".")[0], *CASES[case])
    written = "\n".join([render.as_text(table), render.as_markdown(table), render.as_csv(table)])
    assert written == (WRITTEN / f"{case}.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def published():
    return read_paper("table1_pg19")


@pytest.fixture(scope="module")
def table1():
    return beside_the_papers("table1_pg19")


@pytest.mark.parametrize(
    "override",
    [
        *("retrieval.scorer=recent", "retrieval.rerank=16", "model.block_size=32", "retrieval=per_head"),
        *("data=stdlib", "memory.blocks=9", "eval.task=copy"),
    ],
)
def test_what_the_paper_did_not_measure_has_no_published_number(configure, make_record, published, override):
    overrides = ["model=landmark", "eval.length=2048", "eval.local=250", "memory.blocks=40", "retrieval.k=4"]
    configs = {"a": configure(*overrides), "b": configure(*overrides, override)}
    records = {name: [make_record(config, name, 20.0)] for name, config in configs.items()}
    assert [row.paper for row in build("t", records, published).rows] == [14.92, None]
    assert not build("t", {"b": records["b"]}, published).published


def test_a_narrow_terminal_shows_what_differs_and_every_column_has_a_title(table1):
    wide, narrow = render.as_text(table1), render.as_text(table1, width=100)
    assert max(map(len, narrow.splitlines()[2:16])) <= 100 < max(map(len, wide.splitlines()[2:16]))
    assert "\nin the CSV alone: tokens/s, word ppl, bits/byte, " in narrow
    assert "16.32" in narrow
    assert "4.500 ± 0.002" in narrow
    for value, text in ((8.213, "8.213"), (12345.6, "12,346"), (4.065e10, "over 1e6")):
        assert replace(table1.rows[0], word_perplexity=value).cell("word_perplexity") == text
    shown = {key: each for key, each in COLUMNS.items() if each.title}
    assert len({each.title for each in shown.values()}) == len(shown) == 28
    assert render.plain(table1)[0] == list(COLUMNS)
    assert set(render.columns(table1)) < set(COLUMNS)


def test_a_written_table_is_recognised_and_a_trial_replaces_none(table1, tmp_path):
    trial = replace(table1, rows=table1.rows[:2])
    for launch, table in (("0a", table1), ("1b", trial)):
        assert not render.is_written(table, tmp_path, launch)
        paths = render.write(table, tmp_path, launch)
        assert paths["csv"].read_text() == render.as_csv(table)  # the last one
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert {path.parent.name for path in paths.values()} == {"table1_pg19"}
    assert all(render.is_written(table, tmp_path, launch) for launch, table in (("0a", table1), ("1b", trial)))
    assert (tmp_path / "table1_pg19" / "nano-pg19-gpt2-0a.csv").read_text() == render.as_csv(table1)


@pytest.mark.parametrize(
    ("nats", "seeds", "text", "verdict"),
    [
        (-0.03, None, 0.01, "a is better than b (-0.0300 nats a token; ± 0.0100 over 24 spans, p = 0.0064)"),
        (
            -0.0107,
            0.0029,
            0.001,
            "a is NOT shown to be better than b (-0.0107 nats a token; ± 0.0029 over 3 seeds, p = 0.0",
        ),
        (-0.0107, 0.0020, 0.006, "a is NOT shown to be better than b"),  # by the text
        (-0.0107, 0.0020, 0.001, "a is better than b"),
        (+0.0107, 0.0020, 0.001, "a is WORSE than b"),
        (-0.00004, None, 0.00001, "a and b do not differ by 0.0001 nats"),
        (-0.03, None, None, "a has a lower loss than b, on too little text for an error (-0.0300 nats a token)"),
    ],
)
def test_comparison_says_whether_a_difference_is_more_than_chance_by_each_of_its_errors(nats, seeds, text, verdict):
    mean = Mean(nats, None if seeds is None else Error(seeds, 3, "seeds"), Error(text, 24, "spans"))
    assert verdict in compare("title", "a", "b", mean)
    assert "a and b were not measured on the same text" in compare("title", "a", "b", None)


def test_copies_are_columns_of_rows_that_have_them_and_several_seeds_a_mean_and_a_deviation(configure, make_record):
    books = make_record(configure("model=landmark"), "books", 5.0)

    def row(**results):
        return books | {"results": books["results"] | results}

    copied = row(first_copy=2.0, second_copy=1.5, first_segments=books["results"]["segments"])
    written = render.as_csv(build("t", {"books": [books], "copied": [copied]}))
    rows = {each["name"]: each for each in csv.DictReader(written.splitlines())}
    assert rows["copied"]["first_copy"] == "2.0"
    assert rows["copied"]["first_copy_spread"] == rows["copied"]["second_copy_spread"] != ""
    assert rows["copied"]["accuracy"] == rows["books"]["second_copy"] == rows["books"]["second_copy_spread"] == ""
    for record, shown in ((copied, {"first copy, nats", "second copy, nats"}), (books, set())):
        titles = set(render.columns(build("t", {"a": [record]})).values())
        assert {title for title in titles if "copy" in title} == shown
    seeds = [row(accuracy=share, prompts=10) | {"id": share} for share in (0.2, 0.3, 0.4)]
    (found,) = build("t", {"a": seeds}).rows
    within = 4.3027 * 0.1 / 3**0.5  # Student's t of 2 degrees of freedom; 9 of 30 prompts have a narrower interval
    assert (found.accuracy, found.accuracy_low, found.accuracy_high) == pytest.approx(
        (0.3, 0.3 - within, 0.3 + within), abs=1e-3
    )
    seeds = [row(second_copy=nats) for nats in (1.0, 2.0)]
    seeds[0]["id"], seeds[1]["results"]["segments"] = "other", [[0, 10, 4.0], [20, 10, 6.0]]
    (found,) = build("t", {"a": seeds[1:]}).rows
    assert found.second_copy_spread is None


def test_seeds_that_share_a_record_are_one_measurement(configure, make_record):
    """Nothing that was drawn differs between them: an error of 0 over three would be none."""
    fixed = make_record(configure("model=landmark", "eval.length=1024"), "fixed", 5.0)
    trained = [make_record(configure("model=landmark", f"seed={seed}"), "trained", 5.0 + seed) for seed in range(3)]
    one, three = build("t", {"fixed": [fixed] * 3, "trained": trained}).rows
    assert (one.seeds, three.seeds) == (1, 3)
    assert one.spread == one.text_spread
    assert three.spread == pytest.approx(1 / 3**0.5)
    differences = [math.log(5.0 + seed) - math.log(5.0) for seed in range(3)]
    assert three.difference == pytest.approx(sum(differences) / 3, abs=1e-2)


def test_a_trial_is_marked_and_compared_with_nothing():
    """Not with the paper, with other rows, or in words."""
    config, found = composed("table1_pg19")
    records = {row.name: [row_record(row.configs[0], row.name, 16.0 + number)] for number, row in enumerate(found)}
    for is_trial in (False, True):
        table = build("table1_pg19", records, read_paper("table1_pg19"), config.compare, trial=is_trial)
        said = bool(table.comparisons), table.published, any(row.difference for row in table.rows)
        assert said == (not is_trial,) * 3
        assert table.header.startswith("a trial, whose numbers say nothing: table1_pg19") is is_trial
        assert ("WORSE" in render.as_text(table)) is not is_trial
