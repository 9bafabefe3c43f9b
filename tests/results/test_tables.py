import math
from dataclasses import replace

import pytest

from landmark.config.rows import select
from landmark.results import render
from landmark.results.columns import COLUMNS, provenance_of
from landmark.results.paper import read_paper
from landmark.results.tables import build, compare
from landmark.utils.errors import UserError
from landmark.utils.significance import Difference


@pytest.fixture(scope="module")
def published():
    return read_paper("table1_pg19")


@pytest.fixture
def table1(composer, configure, make_record, published):
    """Table 1 as if we had measured 1.5 times the paper's perplexity everywhere."""
    overrides = ["+experiment=table1_pg19", "size=nano"]
    rows = select(configure(*overrides), overrides, composer)
    records = {
        row.name: [make_record(row.configs[0], row.name, 1.5 * float(paper["perplexity_paper"]))]
        for row, paper in zip(rows, published, strict=True)
    }
    return build("table1_pg19", records, published[::-1], configure(*overrides).compare)


def test_thirteen_rows_stand_beside_the_papers(table1):
    """By their settings, whatever the order of the paper's."""
    assert len(table1.rows) == 13
    for row in table1.rows:
        assert row.perplexity == pytest.approx(1.5 * row.paper)
    assert {(row.name, row.poster) for row in table1.rows} >= {("plain_512", 16.12), ("plain_360", 16.76)}


def test_cutoffs_stand_beside_the_papers(composer, configure, make_record):
    overrides = ["+experiment=table3_cmt", "size=nano"]
    rows = select(configure(*overrides), overrides, composer)
    records = {row.name: [make_record(row.configs[0], row.name, 16.0)] for row in rows}
    for name, each in records.items():
        if name != "no_cmt":
            each[0]["results"]["memory"] = {"drop_rate": 0.5, "drop_rates": [[0.5]]}
    table = build("t", records, read_paper("table3_cmt"))
    printed = {row.name: (row.paper, row.drop_rate_paper, row.drop_rate_poster) for row in table.rows if row.paper}
    assert printed == {
        "no_cmt": (16.28, None, None),
        "cmt_0": (16.38, 0, 0),
        "cmt_0.1": (16.38, 0.23, 0.25),
        "cmt_0.3": (16.43, 0.57, 0.57),
        "cmt_0.5": (16.86, 0.84, 0.84),
        "cmt_1": (19.49, 1, 1),
    }
    assert [row.drop_rate for row in table.rows[:2]] == [None, 0.5]
    assert {row.name: row.cutoff for row in table.rows}["cmt_0.3"] == "0.3"


def test_drop_rates_of_seeds_are_a_mean_and_a_deviation(configure, make_record):
    records = [make_record(configure("cmt=on", f"seed={seed}"), "a", 10.0) for seed in range(3)]
    for record, rate in zip(records, (0.2, 0.3, 0.4)):
        record["results"]["memory"] = {"drop_rate": rate}
    row = build("t", {"a": records}).rows[0]
    assert (row.drop_rate, row.drop_rate_spread) == pytest.approx((0.3, 0.1))
    assert "30.0 ± 10.0 %" in render.as_text(build("t", {"a": records}))


def test_rows_on_arxiv_math_stand_beside_the_papers(composer, configure, make_record):
    overrides = ["+experiment=table1_arxiv", "size=nano"]
    rows = select(configure(*overrides), overrides, composer)
    records = {row.name: [make_record(row.configs[0], row.name, 5.0)] for row in rows}
    table = build("t", records, read_paper("table1_arxiv"))
    assert [row.paper for row in table.rows] == [4.01, 4.31, 4.01, 3.43, 3.41, 3.36, 3.37, 3.35, 3.19, 3.29, 3.18]


@pytest.mark.parametrize(
    "override",
    [
        *("retrieval.scorer=recent", "retrieval.rerank=16", "model.block_size=32", "retrieval=per_head"),
        *("data=stdlib", "memory.blocks=9"),
    ],
)
def test_what_the_paper_did_not_measure_has_no_published_number(configure, make_record, published, override):
    overrides = ["model=landmark", "eval.length=2048", "eval.local=250", "memory.blocks=40", "retrieval.k=4"]
    known = build("t", {"a": [make_record(configure(*overrides), "a", 20.0)]}, published)
    other = build("t", {"a": [make_record(configure(*overrides, override), "a", 20.0)]}, published)
    assert known.rows[0].paper == 14.92
    assert other.rows[0].paper is None
    assert not other.published


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a/gemma", "a/gemma"], "t: gemma, data"), (["a", None], "t: size nano, data"), (["a", "b"], "t: size")],
)
def test_header_names_the_model_of_transformers_that_all_rows_read_with(configure, make_record, names, said):
    records = {}
    for number, name in enumerate(names):
        record = make_record(configure("size=nano", f"seed={number}"), f"row{number}", 20.0)
        record["labels"]["overrides"] = [
            "size=nano",
            *([] if name is None else ["model.name=other", f"model.name={name}"]),
        ]
        records[f"row{number}"] = [record]
    assert build("t", records).header.startswith(said)


def test_a_narrow_terminal_shows_what_differs(table1):
    wide, narrow = render.as_text(table1), render.as_text(table1, width=100)
    landmarks = replace(table1, rows=[row for row in table1.rows if row.model == "landmark"])
    assert render.as_text(landmarks).splitlines()[1] == "all rows: model landmark"
    assert max(map(len, narrow.splitlines()[2:16])) <= 100 < max(map(len, wide.splitlines()[2:16]))
    assert "\nin the CSV alone: tokens/s, word ppl, bits/byte, " in narrow
    assert "16.32" in narrow
    assert "24.48 ± 0.10" in narrow


def test_other_tokens_than_the_papers_are_told(table1):
    said = "the paper's perplexities are of GPT-2's tokens, ours of those of bytes"
    assert said in render.as_text(replace(table1, tokenizer="bytes"))
    assert said not in render.as_text(table1)


@pytest.mark.parametrize(("value", "text"), [(8.213, "8.213"), (12345.6, "12,346"), (4.065e10, "over 1e6")])
def test_a_perplexity_a_word_that_says_nothing_has_no_digits(table1, value, text):
    assert replace(table1.rows[0], word_perplexity=value).cell("word_perplexity") == text


def test_every_column_that_is_shown_says_its_meaning(table1):
    shown = {key: each for key, each in COLUMNS.items() if each.title}
    assert all(each.meaning for each in shown.values())
    assert len({each.title for each in shown.values()}) == len(shown) == 31
    assert COLUMNS["difference"].meaning.endswith(", ± standard error, nats a token")
    assert render.plain(table1)[0] == list(COLUMNS)
    assert set(render.columns(table1)) < set(COLUMNS)


def test_one_core_is_no_cores(configure, make_record):
    record = make_record(configure("size=nano"), "row", 4.5)
    record["provenance"]["hardware"]["cores"] = 1
    assert provenance_of(record)["hardware"] == "an abacus, 1 core"


def test_many_commands_of_one_place_are_counted(table1):
    rows = [replace(row, command=f"python run.py row={row.name}") for row in table1.rows]
    said = [line for line in render.as_text(replace(table1, rows=rows)).splitlines() if line.startswith("measured at")]
    assert len(said) == 1
    assert f"by {len(rows)} commands, listed in the CSV, the first `python run.py row=plain_512`" in said[0]


def test_written_table_is_recognised(table1, tmp_path):
    assert not render.is_written(table1, tmp_path)
    paths = render.write(table1, tmp_path)
    assert render.is_written(table1, tmp_path)
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert {path.parent.name for path in paths.values()} == {"table1_pg19"}


def test_a_trial_replaces_no_table(table1, tmp_path):
    trial = replace(table1, rows=table1.rows[:2])
    for launch, table in (("0a", table1), ("1b", trial)):
        paths = render.write(table, tmp_path, launch)
        assert paths["csv"].read_text() == render.as_csv(table)  # the last one
    assert all(render.is_written(table, tmp_path, launch) for launch, table in (("0a", table1), ("1b", trial)))
    assert (tmp_path / "table1_pg19" / "nano-pg19-gpt2-0a.csv").read_text() == render.as_csv(table1)


def test_difference_from_the_first_row_is_paired(table1):
    base, other = table1.rows[0], table1.rows[1]
    assert base.difference is None
    expected = math.log(other.perplexity / base.perplexity)
    assert other.difference == pytest.approx(expected, abs=0.003)  # the noise of the made-up stretches
    assert 0 < other.difference_error < 0.002


def test_seeds_become_mean_and_standard_deviation(configure, make_record):
    records = [make_record(configure(f"seed={seed}"), "a", 10.0 + seed) for seed in (0, 1, 2)]
    others = [make_record(configure(f"seed={seed}", "retrieval.k=1"), "b", 12.0 + seed) for seed in (0, 1, 2)]
    table = build("t", {"a": records, "b": others}, comparisons={"a or b": ["a", "b"]})
    assert (table.rows[0].perplexity, table.rows[0].spread) == (11.0, 1.0)
    assert "standard deviation over 3 seeds" in table.header
    assert "a is better than b" in table.comparisons[0]
    assert "paired over 3 seeds" in table.comparisons[0]


@pytest.mark.parametrize(
    ("nats", "error", "verdict"),
    [
        (-0.03, 0.01, "a is better than b by more than two standard errors"),
        (-0.02, 0.01, "a is NOT better than b by two standard errors"),
        (+0.02, 0.01, "a is NOT better than b by two standard errors"),
        (-0.00004, 0.00001, "a and b do not differ by 0.0001 nats"),
        (+0.03, 0.01, "a is WORSE than b"),
    ],
)
def test_comparison_says_whether_two_standard_errors_are_passed(nats, error, verdict):
    assert verdict in compare("title", "a", "b", Difference(nats, error, 24))


def test_rows_on_different_text_are_not_compared(configure, make_record):
    records = {name: [make_record(configure(), name, 10.0)] for name in "ab"}
    for segment in records["b"][0]["results"]["segments"]:
        segment[0] += 1
    table = build("t", records, comparisons={"a or b": ["a", "b"]})
    assert "not measured on the same text" in table.comparisons[0]
    assert table.rows[1].difference is None
    render.as_text(table)


def test_row_without_an_error_is_shown_without(configure, make_record, tmp_path):
    table = build("t", {"a": [make_record(configure(), "a", 10.0, error=None)]})
    assert "10.00  " in render.as_text(table)
    render.write(table, tmp_path)


def test_paper_without_the_columns_of_the_join_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "paper.csv").write_text("dataset,model\npg19,landmark\n")
    with pytest.raises(UserError, match="column block_size, eval_length"):
        read_paper("x", tmp_path)
    assert read_paper("y", tmp_path) == []


def test_paper_with_the_same_settings_twice_is_refused(configure, make_record, published):
    record = make_record(configure("model=transformer"), "a", 10.0)
    with pytest.raises(UserError, match="2 rows with the same settings"):
        build("t", {"a": [record]}, [*published, *published])
