"""Pictures are drawn from records alone, whatever an experiment shows."""

import subprocess
import sys
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

import pytest
import vl_convert

from landmark.experiment.config import to_config
from landmark.experiment.config.rows import named
from landmark.experiment.results import render, tables
from landmark.experiment.results.charts import COLOURS, frame, series_looks
from landmark.experiment.results.figures import FIGURES, draw, panels
from landmark.experiment.results.paper import read_paper
from landmark.experiment.results.tables import build, check_figure
from landmark.utils.errors import UserError
from tests.configurations import CONF, compose_conf, row_record
from tests.experiment.results.made_up import composed, made_up, tabulate

ROOT = Path(__file__).parents[3]
LISTED = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml") if "\npanels:" in path.read_text())
MAP, LOSS = "Which blocks the tokens retrieve: ", "Loss on a text, and when it is repeated"

# An experiment: its figure, titles of the first panels, and a column that its table has.
SHOWN = {
    "table1_pg19": ("rows", ["Perplexity", "Perplexity against plain_512"], "perplexity"),
    "ablation_retrieval": ("lines", ["Perplexity", "Difference at the same length"], "perplexity"),
    "figure3_passkey": ("lines", ["Prompts answered"], "accuracy"),
    "ruler": ("tasks", ["niah_single_1", "niah_multikey_2"], "accuracy"),
    "figure5_unique_blocks": ("unique_blocks", ["Distinct blocks of a chunk"], "distinct blocks"),
}
COLUMNS_OF_ONE = ("accuracy", "distinct blocks", "dropped")


def points(panel):
    return panel.chart.data.values


def titles(table):
    return [[panel.title for panel in line] for line in panels(table)]


def fields_and_data(spec, datasets, data=()):
    """For each mark of a specification the fields that it shows, and its data."""
    data = datasets.get(spec["data"]["name"], data) if "data" in spec else data
    if "layer" in spec:
        return [found for layer in spec["layer"] for found in fields_and_data(layer, datasets, data)]
    return [({part["field"] for part in spec["encoding"].values() if part and "field" in part}, data)]


def check_drawn(panel):
    """Vega-Lite ignores a field that it does not find: each one must be in the data."""
    spec = panel.chart.to_dict()
    vl_convert.vegalite_to_vega(spec)
    for fields, data in fields_and_data(spec, spec["datasets"]):
        assert fields <= {key for each in data for key in each} or not data


def test_every_figure_is_that_of_an_experiment():
    assert {figure for figure, _, _ in SHOWN.values()} == set(FIGURES) == set(tables.FIGURES)
    with pytest.raises(UserError, match="figure=cake: must be one of rows, lines, tasks, unique_blocks"):
        check_figure("cake")


@pytest.mark.parametrize("experiment", SHOWN)
def test_a_picture_shows_its_panels_and_the_table_goes_with_it(experiment, tmp_path):
    figure, expected, column = SHOWN[experiment]
    assert composed(experiment)[0].figure == figure
    table = tabulate(experiment)
    assert titles(table)[0] == expected
    for panel in panels(table)[0]:
        check_drawn(panel)
        assert points(panel)
    paths = render.write(table, tmp_path)
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    shown = next(line for line in render.as_text(table).splitlines() if line.startswith("row "))
    assert column in shown
    assert not [other for other in COLUMNS_OF_ONE if other != column and other in shown]
    assert ("perplexity" in shown) == (column != "accuracy")


DRAW = """
import sys
from landmark.experiment.results import render
assert not {"altair", "pandas", "vl_convert"} & set(sys.modules), "loaded before anything is drawn"
from tests.experiment.results.made_up import tabulate
from landmark.experiment.results import figures
table = tabulate("table1_pg19")
render.as_markdown(table), figures.draw(table)
assert "torch" not in sys.modules
"""


def test_a_table_needs_no_torch_and_loads_no_library_before_it_is_drawn():
    done = subprocess.run([sys.executable, "-c", DRAW], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_numbers_are_drawn_with_their_errors_beside_those_of_the_paper_and_its_poster():
    table = tabulate("table1_pg19")
    measured, against = panels(table)[0]
    for row, each in zip(table.rows, points(measured), strict=True):
        assert (each["low"], each["high"]) == pytest.approx((row.perplexity - row.spread, row.perplexity + row.spread))
        assert (each["name"], each["series"]) == (row.name, row.model.replace("_", "-"))
    assert all(each["low"] < each["high"] for each in points(against)[1:])
    table = build("table1_pg19", dict(tabulate("table1_pg19").records), read_paper("table1_pg19"))
    shown = {(each["series"], each["name"]): each["x"] for each in points(panels(table)[0][1])}
    assert shown["paper", "plain_360"] == pytest.approx(100 * (16.80 / 16.32 - 1))
    assert shown["poster", "plain_360"] == pytest.approx(100 * (16.76 / 16.12 - 1))


def test_a_partial_table_is_compared_with_the_experiments_first_row_or_not_at_all():
    """Without that row the first of those that are there would silently take its place."""
    _, selected = composed("table2_granularity")
    names = [row.name for row in selected]

    def shown(present):
        records = {row.name: [made_up(row_record(row.configs[0], row.name, 4.5), "t")] for row in present}
        table = build("t", records, asked=names)
        assert f"t, {len(present)} of {len(names)} rows: " in table.header
        return titles(table)

    assert shown(selected[:3]) == [["Perplexity", f"Perplexity against {names[0]}"]]
    assert shown(selected[1:3]) == [["Perplexity"]]
    assert len(tabulate("table2_granularity", without=("per_head_2048_k4",)).comparisons) == 1


def test_lines_are_compared_at_their_own_length():
    table = tabulate("ablation_retrieval")
    assert {row.against for row in table.rows if row.length == 1024} == {None, "landmark_1024"}
    assert "vs first of its length, nats" in render.as_text(table)
    measured, against = panels(table)[0]
    names = [each["series"] for each in points(measured)[::4]]
    assert names == ["landmark", "rerank", "recent", "random", "mean_key", "sinks", "full"] == list(measured.looks)
    assert len({look.colour for look in measured.looks.values()}) == 7
    lengths = [each["x"] for each in points(measured) if each["series"] == "landmark"]
    assert lengths == sorted(lengths)
    assert [each["y"] for each in points(against) if each["series"] == "landmark"] == [0.0] * 4
    panel = panels(tabulate("ablation_retrieval", listed=True))[0][1]
    assert [each["y"] for each in points(panel) if each["series"] == "landmarks"] == [0.0] * 4
    assert "perplexity against landmarks, percent" in panel.chart.to_json()


def test_a_series_looks_the_same_in_the_panel_of_each_task():
    drawn = list(chain(*panels(tabulate("ruler"))))
    looks = {name: look for panel in drawn for name, look in panel.looks.items()}
    assert all(panel.looks[name] == looks[name] for panel in drawn for name in panel.looks)
    assert looks["landmark"].colour == COLOURS["landmark"]
    assert {"landmark", "recent", "given", "plain", "sinks"} <= looks.keys()
    assert len({look.colour for look in looks.values()}) == len(looks)
    many = series_looks({f"series {number}": "landmark" for number in range(11)})
    assert len({look.colour for look in many.values()}) == 11
    assert many["series 0"].colour == COLOURS["landmark"]


def test_distinct_blocks_are_a_histogram():
    # Of 18 samples in each of four layers 5 retrieve 2 blocks, 9 retrieve 3, 3 retrieve 4 and one 5.
    ((panel,),) = panels(tabulate("figure5_unique_blocks"))
    of_row = [100 * count / 18 for count in (0, 0, 5, 9, 3, 1)] + [0.0]
    assert [each["y"] for each in points(panel)] == pytest.approx(of_row * 3)
    listed = titles(tabulate("pretrained_landmarks", listed=True))
    assert listed == [["Pass keys found"], ["Distinct blocks of a chunk"]]


def test_values_far_above_leave_the_picture_and_are_named():
    scale, note = frame({"a": [1.0, 2.0], "b": [1.5, 9.0]}, 3.0)
    assert scale["domain"] == pytest.approx([0.94, 2.06])
    assert note == "above: b"
    assert frame({"a": [1.0, 2.0]}, 3.0) == ({}, "")
    records = {name: [dict(each[0])] for name, each in tabulate("ablation_retrieval").records.items()}
    far = records["random_2048"][0]
    segments = [[*at, 1.5 * nll] for *at, nll in far["results"]["segments"]]
    far["results"] = far["results"] | {"segments": segments, "perplexity": 4.5**1.5}
    notes = [panel.note for panel in panels(build("t", records, figure="lines"))[0]]
    assert notes == ["above: random_2048"] * 2


# ---- panels that an experiment's file lists


@pytest.mark.parametrize("experiment", LISTED)
def test_a_listed_panel_has_few_series_and_each_has_rows(experiment):
    config = to_config(compose_conf([f"+experiment={experiment}"]))
    for title, panel in config.panels.items():
        assert 2 <= len(panel.series) <= 5 or panel.value == "copies", title
        for pattern in " ".join(panel.series.values()).split():
            assert any(fnmatchcase(row, pattern) for row in named(config)), f"{title}: {pattern}"


# ---- the probe `copy`: maps of the blocks that tokens retrieve, and the loss on both copies


@pytest.fixture
def record(configure):
    """A row's record. best: value of the block half a text before, for a row with a map."""

    def made(name, *overrides, length=400, best=None, scorer="landmark", found=0.9, share_of="attention"):
        words = [f"eval.length={length}", "eval.task=copy", f"retrieval.scorer={scorer}", *overrides]
        record = row_record(configure(*words), name, 5.0)
        record["results"] |= {"first_copy": 2.0, "second_copy": 1.5, "prompts": 50}
        for number, key in enumerate(("first_segments", "segments"), 1):  # with errors of 0.1 and 0.2
            away = 0.1 * number * 7**0.5
            record["results"][key] = [[4096 * at, 1, away * (-1) ** at] for at in range(8)]
        if best is not None:
            size = length // 50
            cells = [[best * (row - size // 2 == block) for block in range(size)] for row in range(size)]
            maps = {"best": cells, "cell": 50, "share_of": share_of}
            record["results"]["copy_map"] = {"layer": 3, "head": 1, "found": found} | maps
        return [record]

    return made


@pytest.mark.parametrize("best", [None, 0.0, 0.6])
def test_a_map_shows_each_cell_in_tokens_and_below_it_the_losses(record, best):
    table = build("t", {"a_400": record("a_400", best=best)})
    *maps, (losses,) = panels(table)
    assert losses.title == LOSS
    first, second = points(losses)
    assert (first["low"], first["x"], second["x"], second["high"]) == pytest.approx((1.9, 2.0, 1.5, 1.7))
    assert draw(table).startswith(b"\x89PNG")
    for panel in chain(*maps, [losses]):
        check_drawn(panel)
    if best is None:
        return
    ((shown,),) = maps
    cells = points(shown)
    expected = [(x, x + 50, x - 200, x - 150) for x in (200, 250, 300, 350)] if best else []
    assert [(each["x"], each["x2"], each["y"], each["y2"]) for each in cells] == expected
    assert {each["value"] for each in cells} == ({0.6} if best else set())
    assert shown.note.startswith("layer 3, head 1; the text is repeated from token 200 on")
    assert "90 % of the tokens" in shown.note


def test_the_row_of_the_same_length_that_retrieves_recent_blocks_stands_beside(record):
    rows = {
        "long_800": record("long_800", best=0.9, length=800),
        "recent_400": record("recent_400", best=0.1, scorer="recent", found=0.0),
        "mean_400": record("mean_400", scorer="mean_key"),  # without a map
        "a_400": record("a_400", best=0.6),
    }
    table = build("t", rows)
    assert titles(table) == [[MAP + "a_400", MAP + "recent_400"], [LOSS]]
    shades = [panel.chart.to_dict()["layer"][0]["encoding"]["fill"]["scale"]["domain"] for panel in panels(table)[0]]
    assert shades == [[0, 0.6]] * 2
    by_chance = {name: record(name, best=0.1, scorer=name[:-4]) for name in ("random_400", "recent_400")}
    assert titles(build("t", by_chance))[0] == [MAP + "random_400", MAP + "recent_400"]


def test_a_map_of_queries_says_so_without_an_unknown_share_and_rows_without_the_probe_are_below(
    record, make_record, configure
):
    books = {name: [make_record(configure("model=landmark"), name, 4.5)] for name in ("books_512", "more_512")}
    mixed = {"a_400": record("a_400", best=0.6)} | books
    assert titles(build("t", mixed)) == [[MAP + "a_400"], [LOSS], ["Perplexity", "Perplexity against books_512"]]
    of_lines = build("t", mixed, figure="lines")
    assert titles(of_lines) == [[LOSS], ["Perplexity", "Difference at the same length"]]
    rows = {"a_400": record("a_400", best=1.0, share_of="queries", found=None)}
    ((shown,), _) = panels(build("t", rows))
    assert "blocks a token retrieves" in shown.chart.to_json()
    assert "%" not in shown.note
