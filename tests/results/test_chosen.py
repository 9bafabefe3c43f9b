"""Panels that experiments list: few series, of rows that exist; drawn from records or from a table's CSV alike."""

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from landmark.config import to_config
from landmark.config.rows import named
from landmark.config.schema import PanelConfig
from landmark.results import render
from landmark.results.__main__ import main, read
from landmark.results.figures import chosen, draw, panels
from tests.configurations import CONF, compose_conf
from tests.results.test_figures import composed, points, tabulate

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml") if "\npanels:" in path.read_text())
CSVS = sorted(ROOT.glob("experiments/*/results/*.csv"))
MOST = 5


def with_panels(experiment):
    return replace(tabulate(experiment), panels=composed(experiment)[0].panels)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_panel_has_few_series_and_each_has_rows(experiment):
    config = to_config(compose_conf([f"+experiment={experiment}"]))
    rows = named(config)
    for title, panel in config.panels.items():
        assert 2 <= len(panel.series) <= MOST or panel.value == "copies", title
        for pattern in " ".join(panel.series.values()).split():
            assert any(fnmatchcase(row, pattern) for row in rows), f"{title}: {pattern}"


@pytest.mark.parametrize("experiment", ["ablation_retrieval", "figure3_passkey"])
def test_a_csv_has_all_that_its_panels_show(experiment, tmp_path):
    table = with_panels(experiment)
    path = tmp_path / experiment / "results" / "a.csv"
    path.parent.mkdir(parents=True)
    path.write_text(render.as_csv(table), encoding="utf-8")
    again = read(path)
    assert again.rows == table.rows
    drawn, expected = ([panel for line in panels(each) for panel in line] for each in (again, table))
    assert [panel.title for panel in drawn] == list(table.panels)
    assert [points(panel) for panel in drawn] == [points(panel) for panel in expected]
    assert main([str(path)]) == 0
    assert path.with_suffix(".png").read_bytes() == draw(again)


@pytest.mark.parametrize("path", CSVS, ids=[f"{path.parent.parent.name}-{path.stem}" for path in CSVS])
def test_recorded_tables_can_be_read(path):
    table = read(path)
    assert table.rows
    assert len({row.name for row in table.rows}) == len(table.rows)


def test_differences_are_from_the_row_that_the_table_compares_with():
    table = with_panels("ablation_retrieval")
    panel = panels(table)[0][1]
    base = [each["y"] for each in points(panel) if each["series"] == "landmarks"]
    assert base == [0.0] * 4
    assert "perplexity against landmarks, percent" in str(panel.spec["layer"][-1]["encoding"]["y"])


def test_series_of_one_length_stand_beside_their_names():
    table = replace(
        tabulate("ablation_retrieval"),
        panels={"a": PanelConfig(series={"best": "landmark_2048", "newest": "recent_2048", "none": "nothing_*"})},
    )
    ((panel,),) = chosen.panels(table)
    assert [each["name"] for each in points(panel)] == ["best", "newest"]


def test_a_table_without_rows_of_any_panel_shows_its_figure():
    table = replace(tabulate("ablation_retrieval"), panels={"a": PanelConfig(series={"none": "nothing_*"})})
    assert [panel.title for panel in panels(table)[0]] == ["Perplexity", "Difference at the same length"]


def test_a_file_that_is_no_table_is_named(tmp_path, capsys):
    path = tmp_path / "ruler" / "results" / "a.csv"
    path.parent.mkdir(parents=True)
    path.write_text("a,b\n1,2\n")
    assert main([str(path)]) == 2
    assert f"{path}: not the CSV of a table" in capsys.readouterr().err
    assert main([str(tmp_path / "a.csv")]) == 2
