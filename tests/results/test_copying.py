"""The figure of the probe `copy`: maps of the blocks that tokens retrieve, and the loss on both copies."""

import pytest
import vl_convert

from landmark.results.figures import draw, panels
from landmark.results.tables import build
from tests.configurations import row_record
from tests.results.test_figures import fields_and_data, points

MAP, LOSS = "Which blocks the tokens retrieve: ", "Loss on a text, and when it is repeated"


@pytest.fixture
def record(configure):
    """A row's record. best: value of the block half a text before, for a row with a map."""

    def made(name, *overrides, length=400, best=None, scorer="landmark", found=0.9, share_of="attention"):
        words = [f"eval.length={length}", "eval.probe=copy", f"retrieval.scorer={scorer}", *overrides]
        record = row_record(configure(*words), name, 5.0)
        copies = {"first_copy": 2.0, "first_copy_se": 0.1, "second_copy": 1.5, "second_copy_se": 0.2, "prompts": 50}
        record["results"] |= copies
        if best is not None:
            size = length // 50
            cells = [[best * (row - size // 2 == block) for block in range(size)] for row in range(size)]
            maps = {"best": cells, "mean": cells, "cell": 50, "share_of": share_of}
            record["results"]["copy_map"] = {"layer": 3, "head": 1, "found": found} | maps
        return [record]

    return made


def titles(table):
    return [[panel.title for panel in line] for line in panels(table)]


def test_a_map_shows_each_cell_in_tokens(record):
    table = build("t", {"a_400": record("a_400", best=0.6)}, figure="copying")
    (shown,), (losses,) = panels(table)
    cells = points(shown)
    assert [(each["x"], each["x2"], each["y"], each["y2"]) for each in cells] == [
        (x, x + 50, x - 200, x - 150) for x in (200, 250, 300, 350)
    ]
    assert {each["value"] for each in cells} == {0.6}
    assert cells[1]["tooltip"].startswith("position of the token 250, position of the block retrieved 50\n")
    assert "the text is repeated from token 200 on" in shown.note
    assert "layer 3, head 1" in shown.note
    assert "90 % of the tokens" in shown.note
    assert losses.title == LOSS


def test_the_row_of_the_same_length_that_retrieves_recent_blocks_stands_beside(record):
    rows = {
        "long_800": record("long_800", best=0.9, length=800),
        "recent_400": record("recent_400", best=0.1, scorer="recent", found=0.0),
        "mean_400": record("mean_400", scorer="mean_key"),  # without a map
        "a_400": record("a_400", best=0.6),
    }
    table = build("t", rows, figure="copying")
    assert titles(table) == [[MAP + "a_400", MAP + "recent_400"], [LOSS]]
    shades = [panel.spec["layer"][0]["encoding"]["fill"]["scale"]["domain"] for panel in panels(table)[0]]
    assert shades == [[0, 0.6]] * 2
    rows["better_400"] = record("better_400", best=0.6)
    rows["better_400"][0]["results"]["second_copy"] = 1.2
    assert titles(build("t", rows, figure="copying"))[0] == [MAP + "better_400", MAP + "recent_400"]
    del rows["recent_400"]
    assert titles(build("t", rows, figure="copying"))[0] == [MAP + "long_800"]


def test_rows_that_retrieve_by_chance_are_shown_where_there_are_no_others(record):
    rows = {name: record(name, best=0.1, scorer=name[:-4]) for name in ("random_400", "recent_400")}
    assert titles(build("t", rows, figure="copying")) == [[MAP + "random_400", MAP + "recent_400"], [LOSS]]
    del rows["random_400"]
    assert titles(build("t", rows, figure="copying")) == [[MAP + "recent_400"], [LOSS]]


def test_records_without_a_map_show_the_losses_alone(record):
    table = build(
        "t", {"plain_400": record("plain_400", "model=transformer"), "a_400": record("a_400")}, (), {}, "copying"
    )
    assert titles(table) == [[LOSS]]
    made = {(each["name"], each["series"]): each for each in points(panels(table)[0][0])}
    assert len(made) == 4
    second = made["plain_400", "second copy"]
    assert (second["x"], second["low"], second["high"]) == pytest.approx((1.5, 1.3, 1.7))


def test_rows_without_the_probe_show_their_perplexity(record, make_record, configure):
    books = {name: [make_record(configure("model=landmark"), name, 4.5)] for name in ("books_512", "more_512")}
    perplexities = "Perplexity, measured here"
    assert titles(build("t", books, figure="copying")) == [[perplexities]]
    mixed = {"a_400": record("a_400", best=0.6)} | books
    assert titles(build("t", mixed, figure="copying")) == [[MAP + "a_400"], [LOSS, perplexities]]


def test_a_map_of_queries_says_so_and_an_unknown_share_is_left_out(record):
    rows = {"a_400": record("a_400", best=1.0, share_of="queries", found=None)}
    ((shown,), _) = panels(build("t", rows, figure="copying"))
    assert shown.spec["layer"][0]["encoding"]["fill"]["legend"]["title"] == "blocks a token retrieves"
    assert "%" not in shown.note


@pytest.mark.parametrize("best", [None, 0.0, 0.6])
def test_picture_is_a_png_and_all_its_fields_are_in_its_data(record, best):
    table = build("t", {"a_400": record("a_400", best=best)}, figure="copying")
    assert draw(table).startswith(b"\x89PNG")
    for panel in [panel for line in panels(table) for panel in line]:
        vl_convert.vegalite_to_vega(panel.fading())
        for fields, data in fields_and_data(panel.spec):
            assert fields <= {key for each in data for key in each} or not data
