"""Pictures are drawn from records alone, whatever an experiment shows."""

import copy
import functools
import json
import math
import random
import subprocess
import sys

import pytest
import vl_convert

from landmark.config import to_config
from landmark.config.rows import select
from landmark.results import render
from landmark.results.figures import FIGURES, check_figure, draw, draw_positions, panels
from landmark.results.figures.marks import curves as draw_curves
from landmark.results.figures.marks import point
from landmark.results.figures.positions import curves
from landmark.results.figures.style import COLOURS, PALETTE, Look, colours, frame, series, series_looks
from landmark.results.paper import read_paper
from landmark.results.tables import build
from landmark.utils.errors import UserError
from landmark.utils.significance import clopper_pearson
from tests.configurations import compose_conf, row_record

SHOWN = {  # figure: an experiment that shows it
    "rows": "table2_granularity",
    "lines": "ablation_retrieval",
    "heatmap": "sweep_k_local",
    "drop_rate": "table3_cmt",
    "unique_blocks": "figure5_unique_blocks",
    "accuracy": "figure3_passkey",
    "recall": "retriever",
    "tasks": "ruler",
    "widths": "mqar",
}


@functools.cache
def tabulate(experiment, without=()):
    """The table of an experiment with made-up results; without: rows that have no record."""
    config, selected = composed(experiment)
    records = {
        row.name: [made_up(row_record(row.configs[0], row.name, 4.5), config.figure)]
        for row in selected
        if row.name not in without
    }
    cells = {row.name: row.cell for row in selected if row.cell is not None}
    return build(experiment, records, (), config.compare, config.figure, cells)


@functools.cache
def composed(experiment):
    overrides = [f"+experiment={experiment}", "size=nano"]
    config = to_config(compose_conf(overrides))
    return config, select(config, overrides, compose_conf)


def made_up(record, figure):
    results, draw_from = record["results"], random.Random(record["labels"]["row"])
    if figure in ("accuracy", "recall", "tasks", "widths"):
        for key in ("perplexity", "perplexity_se", "nll", "bits_per_byte", "word_perplexity", "segments"):
            del results[key]
        if figure == "recall":
            ranks = [draw_from.randrange(1, 30) for _ in range(50)]
            results |= {"prompts": 50, "ranks": ranks}
            for n in (1, 10):
                hits = sum(rank <= n for rank in ranks)
                results |= {f"recall_at_{n}": hits / 50, f"recall_at_{n}_interval": list(clopper_pearson(hits, 50))}
            return record
        right = draw_from.randrange(51)
        low, high = clopper_pearson(right, 50)
        results |= {"accuracy": right / 50, "accuracy_low": low, "accuracy_high": high, "prompts": 50}
        return record
    bins = -(-record["settings"]["eval_length"] // 64)
    results["position_nll"] = [[640.0, 640 * (1.5 + draw_from.random() / (1 + i))] for i in range(bins)]
    if "cmt_cutoff" in record["settings"]:
        share = record["settings"]["cmt_cutoff"] ** 0.7
        results["memory"] = {"drop_rate": share, "drop_rates": [[share * layer / 4] * 4 for layer in range(1, 5)]}
    if figure == "unique_blocks":
        layers = [{"distinct_blocks": [0, 0, 5, 9, 3, 1], "bytes_moved": 3e5} for _ in range(4)]
        results["retrieval"] = {
            "samples": 18,
            "blocks_cached": 5,
            "distinct_blocks": 3.0,
            "bytes_moved": 1.2e6,
            "bytes_cached": 2e6,
            "layers": layers,
        }
    return record


def points(panel):
    """The measurements that a panel shows."""
    return [each for each in panel.spec["data"]["values"] if "tooltip" in each]


def test_every_figure_is_that_of_an_experiment():
    assert SHOWN.keys() | {"copying"} == set(FIGURES)  # test_copying.py shows it, with records of probes
    assert composed("quickstart")[0].figure == "copying"
    for figure, experiment in SHOWN.items():
        assert composed(experiment)[0].figure == figure


@pytest.mark.parametrize("figure", SHOWN)
def test_picture_is_a_png_and_the_table_goes_with_it(figure, tmp_path):
    table = tabulate(SHOWN[figure])
    paths = render.write(table, tmp_path)
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    of_answers = figure in ("accuracy", "tasks", "widths")
    assert ("positions" in paths) == (not of_answers and figure != "recall")
    shown = next(line for line in render.as_text(table).splitlines() if line.startswith("row "))
    assert ("accuracy" in shown) == of_answers
    assert ("perplexity" in shown) == (not of_answers and figure != "recall")
    assert ("median rank" in shown) == (figure == "recall")
    assert ("distinct blocks" in shown) == (figure == "unique_blocks")
    assert ("dropped" in shown) == (figure == "drop_rate")


DRAW = """
import json, sys
from landmark.results import figures, render, tables
for figure, (records, cells) in json.load(sys.stdin).items():
    table = tables.build("t", records, figure=figure, cells=cells)
    render.as_markdown(table), figures.draw(table), figures.draw_positions(table)
assert "torch" not in sys.modules
"""


def test_drawing_needs_no_torch():
    given = {figure: tabulate(experiment) for figure, experiment in SHOWN.items()}
    given = {figure: (dict(table.records), dict(table.cells)) for figure, table in given.items()}
    done = subprocess.run([sys.executable, "-c", DRAW], input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_accuracy_is_shown_with_its_interval(configure, make_record):
    record = made_up(make_record(configure("model=landmark"), "landmark_512", 4.5), "accuracy")
    low, high = clopper_pearson(48, 50)
    record["results"] |= {"accuracy": 0.96, "accuracy_low": low, "accuracy_high": high}
    table = build("t", {"landmark_512": [record]}, figure="accuracy")
    assert "96 % [86, 100]" in render.as_text(table)
    assert "50 prompts; in brackets the 95 % interval" in table.header
    assert not {"perplexity", "bits/byte", "vs first row, nats"} & set(
        render.as_text(table).splitlines()[2].split("  ")
    )


def test_what_a_memory_off_the_device_took_is_shown(configure, make_record):
    records = {}
    for length in (512, 1024):
        record = made_up(
            make_record(configure("model=landmark", f"eval.length={length}"), f"a_{length}", 4.5), "accuracy"
        )
        record["results"] |= {"peak_memory_bytes": 3e8 + length, "seconds": 10.0, "tokens_per_second": 100.0}
        records[f"a_{length}"] = [record]
    plain = build("t", records, figure="accuracy")
    assert {row.resident_bytes for row in plain.rows} == {None}
    assert "peak, MB" not in render.as_text(plain)
    for (record,) in records.values():
        record["results"]["memory"] = {"cache_hits": 7, "seconds_searching": 2.5}
    table = build("t", records, figure="accuracy")
    assert [(row.resident_bytes, row.searching) for row in table.rows] == [(3e8 + 512, 0.25), (3e8 + 1024, 0.25)]
    assert "peak, MB" in render.as_text(table)
    assert "25 %" in render.as_text(table)
    (top,), (memory, speed) = panels(table)
    assert [each["y"] for each in points(memory)] == [300.000512, 300.001024]
    assert [(each["series"], each["y"]) for each in points(speed)[:2]] == [
        ("all", 100.0),
        ("less the search", pytest.approx(100 / 0.75)),
    ]
    assert [len(line) for line in panels(plain)] == [1]
    assert top.spec["layer"][-1]["encoding"]["y"]["title"].startswith("prompts answered")


def test_accuracy_of_seeds_is_a_mean_and_a_deviation(configure, make_record):
    records = [made_up(make_record(configure(f"seed={seed}"), "a", 4.5), "accuracy") for seed in range(3)]
    for record, right in zip(records, (40, 45, 50)):
        record["results"]["accuracy"] = right / 50
    row = build("t", {"a": records}, figure="accuracy").rows[0]
    assert (row.accuracy, row.accuracy_low, row.accuracy_high) == pytest.approx((0.9, 0.8, 1.0))


def test_series_are_named_as_their_rows_and_sorted_by_length():
    table = tabulate("ablation_retrieval")
    found = series(table)
    assert list(found) == ["landmark", "rerank", "recent", "random", "mean_key", "sinks", "full"]
    assert all([row.length for row in rows] == [512, 1024, 2048, 4096] for rows in found.values())
    looks = series_looks({name: rows[0].model for name, rows in found.items()})
    assert len({look.colour for look in looks.values()}) == 7


def test_series_differ_in_colour_as_long_as_there_are_colours():
    looks = series_looks({f"series {number}": "landmark" for number in range(11)})
    assert len({look.colour for look in looks.values()}) == 11
    assert looks["series 0"].colour == COLOURS["landmark"]


def test_lines_are_compared_at_their_own_length():
    table = tabulate("ablation_retrieval")
    assert {row.against for row in table.rows if row.length == 1024} == {None, "landmark_1024"}
    assert "vs first of its length, nats" in render.as_text(table)


def test_cells_without_a_record_are_left_blank():
    table = tabulate("sweep_k_local", without=("k1_local150", "k8_local350", "xl_2048"))
    assert len(table.cells) == 12
    assert len(table.rows) == 11
    assert draw(table).startswith(b"\x89PNG")


def test_grid_without_cells_is_shown_as_rows(configure, make_record):
    table = build("t", {"plain_512": [make_record(configure("model=transformer"), "plain_512", 4.5)]}, figure="heatmap")
    assert draw(table).startswith(b"\x89PNG")


def test_comparison_with_a_row_that_has_no_record_is_left_out():
    table = tabulate("table2_granularity", without=("per_head_2048_k4",))
    assert len(table.comparisons) == 1


def test_curve_over_positions_pools_far_bins(configure, make_record):
    record = make_record(configure("eval.length=4096"), "a", 4.5)
    record["results"]["position_nll"] = [[10.0, 10 * math.log(2 + i)] for i in range(64)]
    curve = curves(build("t", {"a": [record]}))["a"]
    assert curve[:8] == [(64 * i + 32, pytest.approx(2 + i)) for i in range(8)]
    assert len(curve) < 25
    assert [x for x, _ in curve] == sorted(x for x, _ in curve)
    assert curve[-1][1] == pytest.approx(math.exp(sum(math.log(2 + i) for i in range(56, 64)) / 8), rel=0.1)


def test_rows_without_a_curve_make_no_picture_of_curves(configure, make_record):
    assert draw_positions(build("t", {"a": [make_record(configure(), "a", 4.5)]})) is None


def test_an_unknown_figure_is_refused():
    with pytest.raises(UserError, match="figure=cake: must be one of rows, lines, heatmap"):
        check_figure("cake")


def fields_and_data(spec, fields=(), data=()):
    """For each mark of a specification the fields that it shows, and its data: layers share those around them."""
    fields = {*fields, *(part["field"] for part in spec.get("encoding", {}).values() if part and "field" in part)}
    data = spec.get("data", {}).get("values", data)
    if "mark" in spec:
        return [(fields, data)]
    return [found for layer in spec["layer"] for found in fields_and_data(layer, fields, data)]


@pytest.mark.parametrize("figure", SHOWN)
def test_every_panel_is_understood_and_shows_its_points(figure):
    """Vega-Lite ignores a field that it does not find: each one must be in the data."""
    for panel in [panel for line in panels(tabulate(SHOWN[figure])) for panel in line]:
        vl_convert.vegalite_to_vega(panel.fading())
        for fields, data in fields_and_data(panel.spec):
            assert fields <= {key for each in data for key in each}


def test_errors_are_drawn_and_told():
    table = tabulate("table2_granularity")
    measured, against = panels(table)[0]
    for row, each in zip(table.rows, points(measured), strict=True):
        assert (each["low"], each["high"]) == pytest.approx((row.perplexity - row.spread, row.perplexity + row.spread))
        assert each["tooltip"].startswith(f"{row.name}, landmark\n{row.perplexity:.4g} (")
    assert all(each["low"] < each["high"] for each in points(against)[1:])


def test_what_the_paper_and_its_poster_print_is_shown():
    table = build("table1_pg19", dict(tabulate("table1_pg19").records), read_paper("table1_pg19"))
    shown = {(each["series"], each["name"]): each["x"] for each in points(panels(table)[0][1])}
    assert shown["paper", "plain_360"] == pytest.approx(100 * (16.80 / 16.32 - 1))
    assert shown["poster", "plain_360"] == pytest.approx(100 * (16.76 / 16.12 - 1))


def test_values_far_above_leave_the_picture_and_are_named():
    scale, note = frame({"a": [1.0, 2.0], "b": [1.5, 9.0]}, 3.0)
    assert scale["domain"] == pytest.approx([0.94, 2.06])
    assert note == "above: b"
    assert frame({"a": [1.0, 2.0]}, 3.0) == ({}, "")
    made = [point("b", x, y) for x, y in ((1.0, 1.0), (2.0, 3.0), (3.0, 1.0))]
    y = {"title": "y", "scale": {"domain": [0.0, 2.0]}}
    panel = draw_curves("t", made, {"b": Look("#000000")}, {"title": "x"}, y, note="above: b")
    drawn = [(each["x"], each["y"]) for each in panel.spec["data"]["values"]]
    assert drawn == [(1.0, 1.0), (1.5, 2.0), (2.0, None), (2.5, 2.0), (3.0, 1.0)]
    assert [each["x"] for each in points(panel)] == [1.0, 3.0]


def test_colours_are_different_however_many():
    assert colours(8) == list(PALETTE)
    assert all(len(set(colours(count))) == count for count in (1, 9, 12, 24))
    assert all(len(colour) == 7 for colour in colours(12))


def test_distinct_blocks_are_a_histogram_of_all_layers():
    """Of 18 samples in each of four layers 5 retrieve 2 blocks, 9 retrieve 3, 3 retrieve 4 and one 5."""
    ((panel,),) = panels(tabulate("figure5_unique_blocks"))
    values = [each["y"] for each in points(panel)]
    of_row = [100 * count / 18 for count in (0, 0, 5, 9, 3, 1)] + [0.0]
    assert values == pytest.approx(of_row * 3)


def test_cells_of_a_grid_have_their_numbers():
    grid, _ = panels(tabulate("sweep_k_local", without=("k1_local150",)))[0]
    assert [each["text"] for each in points(grid)].count("4.500") == 11
    assert [each["text"] for each in points(grid)].count("missing") == 1


def test_differences_that_span_decades_have_a_logarithmic_axis():
    records = copy.deepcopy(dict(tabulate("ablation_retrieval").records))
    first = next(iter(records.values()))[0]["results"]["segments"]
    for (record,) in records.values():
        record["results"]["segments"] = [segment[:] for segment in first]
    scale = panels(build("t", records, figure="lines"))[0][1].spec["layer"][-1]["encoding"]["y"]["scale"]
    assert "type" not in scale
    for segment in records["random_2048"][0]["results"]["segments"]:
        segment[2] *= 1.5
    scale = panels(build("t", records, figure="lines"))[0][1].spec["layer"][-1]["encoding"]["y"]["scale"]
    assert scale["type"] == "symlog"


def test_figures_are_not_loaded_before_one_is_drawn():
    code = "import sys; from landmark.results import page, render; assert 'vl_convert' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_panel_for_each_task_has_the_same_series():
    drawn = [panel for line in panels(tabulate("ruler")) for panel in line]
    assert [panel.title for panel in drawn][:2] == ["niah_single_1", "niah_multikey_2"]
    assert all(panel.looks == drawn[0].looks for panel in drawn)
    assert {"landmark", "recent", "given", "window", "plain", "sinks"} <= drawn[0].looks.keys()
    assert {name: look.colour for name, look in drawn[0].looks.items()}["landmark"] == "#D55E00"
    assert len({look.colour for look in drawn[0].looks.values()}) == len(drawn[0].looks) == 10


def test_widths_stand_across_and_the_widest_models_below():
    widths, *lengths = panels(tabulate("mqar"))
    assert [panel.title for panel in widths] == ["pairs4, 64 tokens", "pairs8, 128 tokens", "pairs16, 256 tokens"]
    assert {each["x"] for each in widths[0].spec["data"]["values"]} == {32, 64, 128}
    below = [panel for line in lengths for panel in line]
    assert [panel.title for panel in below] == ["pairs4", "pairs8", "pairs16"]
    assert all(
        "width" not in each["tooltip"] and "-w" not in each["tooltip"] for each in below[0].spec["data"]["values"]
    )


def test_a_partial_table_is_compared_with_the_experiments_first_row_or_not_at_all(make_record):
    """Without that row the first of those that are there would silently take its place."""
    _, selected = composed("table2_granularity")
    names = [row.name for row in selected]

    def titles(present):
        records = {row.name: [made_up(row_record(row.configs[0], row.name, 4.5), "rows")] for row in present}
        table = build("t", records, asked=names)
        assert f"t, {len(present)} of {len(names)} rows: " in table.header
        return [panel.title for line in panels(table) for panel in line]

    assert f"Perplexity against {names[0]}" in titles(selected[:3])
    assert not [title for title in titles(selected[1:3]) if "against" in title]
