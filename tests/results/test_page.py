"""task=report: one page that a browser shows from a file, with what the records hold and nothing from elsewhere."""

import json
import re

import pytest

from landmark.results.page import page_content
from landmark.utils.errors import UserError
from tests.workplace import Workplace

HOSTILE = "</script><script>document.title = 'taken'</script><b id=taken>&amp;"


@pytest.fixture(scope="module")
def work(books, tmp_path_factory):
    """Table 1, the sweep, a row of the quickstart and a free row with a hostile name; one record is cut short."""
    with pytest.MonkeyPatch.context() as patch:
        work = Workplace(books, tmp_path_factory.mktemp("report") / "outputs", patch)
        work.curves = True
        work("+experiment=table1_pg19", "task=evaluate")
        work("+experiment=sweep_k_local", "task=evaluate")
        work("+experiment=quickstart", "data=pg19", "row=plain_512", "eval.tokens=8000")
        work("model=landmark", "retrieval.k=7", "eval.tokens=8100")
        rows = {path: json.loads(path.read_text()) for path in (work.output / "records" / "rows").iterdir()}
        by_name = {record["labels"]["row"]: path for path, record in rows.items()}
        work.edit(by_name["single"], labels={"row": HOSTILE, "overrides": [HOSTILE]}, provenance={"command": HOSTILE})
        work.damaged = by_name["k8_local350"]
        work.damaged.write_text(work.damaged.read_text()[:99])
        yield work


@pytest.fixture(scope="module")
def page(work):
    work.task("task=report", f"output={work.output}")
    return work.output / "report.html"


def rows_shown(browser, section):
    """Cells of the rows that are seen in a section's table."""
    script = """return [...document.getElementById(arguments[0]).querySelectorAll("tbody:not([hidden])")]
        .map(body => [...body.rows[0].cells].map(cell => cell.textContent.trim()))"""
    return browser.js(script, section)


def section(browser, name):
    script = "return [...document.querySelectorAll('nav a')].find(a => a.textContent === arguments[0]).hash.slice(1)"
    return browser.js(script, name)


def column(browser, name, title):
    script = "return [...document.querySelectorAll(`#${arguments[0]} thead button`)].map(each => each.textContent)"
    return browser.js(script, section(browser, name)).index(title)


def test_page_says_what_was_measured_and_asks_for_nothing(browser, page, work):
    browser.open(page)
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.texts("h2") == [
        "Overview",
        "quickstart",
        "Sweep: blocks retrieved against local context",
        "Table 1, PG-19: perplexity with memory",
        "Other rows: text of pg19, nano, bytes",
    ]
    done = [cells[5] for cells in rows_shown(browser, "overview")]
    assert done == ["1 of 6", "13 of 14", "13 of 13"]
    first = dict(zip(browser.texts("#s2 thead button"), rows_shown(browser, "s2")[0], strict=True))
    assert (first["row"], first["paper"], first["poster"]) == ("plain_512", "16.32", "16.12")
    assert first["perplexity"] == "7.32 ± 0.01"
    (better, longer), (worse,) = browser.texts("#s2 li.yes"), browser.texts("#s2 li.no, #s2 li.worse")
    assert "landmark_2048_k4 is better than plain_512" in better
    assert "landmark_4096_k4 is better than landmark_2048_k4" in longer
    assert "xl_2048" in worse
    (problem,) = browser.texts(".problem")
    assert problem.startswith(f"{work.damaged} is not valid JSON, cut short")


def test_what_a_record_holds_is_text(browser, page):
    browser.open(page)
    assert browser.js("return document.title") == "Landmark attention: what was measured"
    assert browser.js("return document.getElementById('taken')") is None
    (cells,) = rows_shown(browser, "o3")
    assert cells[0] == HOSTILE
    browser.click("#o3 .more")
    assert HOSTILE in browser.texts("#o3 .source dd")
    assert browser.errors() == []


def test_rows_are_sorted_by_their_numbers(browser, page):
    browser.open(page)
    at = column(browser, "table1_pg19", "perplexity")
    header = f"#s2 thead th:nth-child({at + 1})"
    order = [cells[0] for cells in rows_shown(browser, "s2")]
    browser.click(f"{header} button")
    up = [float(cells[at].split()[0]) for cells in rows_shown(browser, "s2")]
    assert up == sorted(up)
    assert browser.js("return document.querySelector(arguments[0]).ariaSort", header) == "ascending"
    browser.type(f"{header} button", "\n")  # the keyboard does it too
    assert [float(cells[at].split()[0]) for cells in rows_shown(browser, "s2")] == up[::-1]
    assert browser.js("return document.querySelector(arguments[0]).ariaSort", header) == "descending"
    browser.type(f"{header} button", "\n")
    assert [cells[0] for cells in rows_shown(browser, "s2")] == order
    blocks = column(browser, "table1_pg19", "blocks")
    for _ in range(2):  # what is not there stands at the end, either way
        browser.click(f"#s2 thead th:nth-child({blocks + 1}) button")
        assert [cells[blocks] for cells in rows_shown(browser, "s2")][-4:] == ["-"] * 4


def test_rows_are_filtered_by_their_words(browser, page):
    browser.open(page)
    browser.type("#s2 input", "LANDMARK 4096")
    names = [cells[0] for cells in rows_shown(browser, "s2")]
    assert names == ["landmark_4096_k4_blocks40", "landmark_4096_k2", "landmark_4096_k4"]
    assert browser.texts("#s2 .tools .few") == ["3 of 13 rows"]
    assert len(rows_shown(browser, "s1")) == 13


def test_command_of_a_row_is_copied_and_reproduces_it(browser, page, work):
    browser.open(page)
    browser.click("#s2 tbody:nth-of-type(9) .more")
    (shown,) = browser.texts("#s2 .source code")
    assert shown.startswith("python run.py ")
    assert shown.endswith(f" +experiment=table1_pg19 output={work.output} row=landmark_2048_k4")
    browser.click("#s2 .source .copy")
    browser.type("#s2 input", "\ue009v")  # Ctrl and v
    assert browser.js("return document.querySelector('#s2 input').value") == shown
    work.task(*shown.split()[2:])
    assert work.evaluated == []  # it names the row whose record this is


def test_command_does_the_rest(browser, page, work):
    browser.open(page)
    (told,) = [text for text in browser.texts("#s0 > .few") if "no record yet" in text]
    assert told.startswith("5 of 6 rows have no record yet: twice_last_blocks, twice_landmarks, twice_second_look, ")
    (rest,) = browser.texts("#s0 > .command code")
    assert f"output={work.output}" in rest.split()


ALL_DRAWN = """return new Promise(done => {
    const look = () => (waiting.size ? setTimeout(look, 50) : requestAnimationFrame(() => setTimeout(done, 300)));
    look();
})"""
POINT = """document.querySelector(arguments[0]).scrollIntoView({block: "center"});
    const at = document.querySelector(arguments[0]).getBoundingClientRect();
    const [clientX, clientY] = [at.x + at.width / 2, at.y + at.height / 2];
    for (const kind of arguments[1])
        document.elementFromPoint(clientX, clientY).dispatchEvent(
            new PointerEvent(kind, {bubbles: true, clientX, clientY}));
    return document.getElementById("tip").innerText"""


def test_pictures_are_drawn_and_answer_the_pointer(browser, page):
    browser.open(page)
    browser.js(ALL_DRAWN)
    assert browser.errors() == []
    assert browser.js("return document.querySelectorAll('figure').length") == browser.js(
        "return document.querySelectorAll('figure svg').length"
    )
    cells = "#s1 figure:first-child .mark-rect.role-mark path"
    assert browser.js("return document.querySelectorAll(arguments[0]).length", cells) == 11
    assert "missing" in browser.texts("#s1 svg text")
    assert len(browser.texts("#overview .mark-symbol.role-mark path")) > 12
    assert browser.js(POINT, cells, ["pointermove", "mousemove"]).startswith("retrieval.k 1, eval.local 150\n2.6")
    faded = "return document.querySelectorAll(\"#s2 figure:first-child path[opacity='0.12']\").length"
    assert browser.js(faded) == 0
    browser.js(POINT, "#s2 figure:first-child .role-legend-label text", ["click"])
    browser.js("return new Promise(done => setTimeout(done, 300))")
    assert browser.js(faded) > 0
    browser.click("#s2 summary")
    titles = browser.texts("#s2 details figcaption")
    assert (titles[0].splitlines()[0], titles[-1]) == ("Segments of 360 and 512 tokens", "Training")
    lines = "#s2 details figure:last-child .mark-line.role-mark path"
    assert len(browser.texts(lines)) == 6
    assert "NaN" not in browser.js("return document.querySelector('main').innerHTML")


def test_code_in_a_text_is_not_run(page):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page.read_text())
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")


def test_page_can_be_printed_in_full(browser, page):
    browser.open(page, dark=True)
    browser.js(ALL_DRAWN)
    browser._command("Emulation.setEmulatedMedia", media="print", features=[])
    browser.js("dispatchEvent(new Event('beforeprint'))")
    assert browser.js("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.js("return document.querySelectorAll('details:not([open])').length") == 0
    assert all(
        height > 50
        for height in browser.js("return [...document.querySelectorAll('figure svg')].map(e => e.clientHeight)")
    )
    browser._command("Emulation.setEmulatedMedia", media="")


def test_light_dark_and_narrow(browser, page):
    colour = "return getComputedStyle(document.body).backgroundColor"
    browser.open(page, dark=True)
    dark = browser.js(colour)
    browser.open(page, width=390, height=800)
    light = browser.js(colour)
    assert light != dark
    assert browser.js("return document.documentElement.scrollWidth") == 390
    browser.click("#theme")
    assert browser.js(colour) == dark
    browser.open(page)
    assert browser.js(colour) == dark  # as it was chosen
    browser.click("#theme")
    assert browser.js(colour) == light
    assert browser.errors() == []


def test_one_experiment_has_a_page_of_its_own(work, capsys):
    work.task("+experiment=quickstart", "task=report", f"output={work.output}")
    assert re.search(r"^written: \S+report-quickstart\.html, \d+ kB$", capsys.readouterr().out, re.MULTILINE)
    text = (work.output / "report-quickstart.html").read_text()
    assert "plain_512" in text
    assert "k1_local150" not in text


def test_without_records_nothing_is_written(work, tmp_path):
    with pytest.raises(UserError, match="there are no records to report"):
        work.task("task=report", f"output={tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match=r"quickstart has no records with these settings, but with others: nano, pg19"):
        work.task("+experiment=quickstart", "size=small", "task=report", f"output={work.output}")
    with pytest.raises(UserError, match=r"mqar has no records yet, `.*` makes them; there are some of quickstart, "):
        work.task("+experiment=mqar", "task=report", f"output={work.output}")


def test_kinds_of_measurement_are_not_compared(work, tmp_path, monkeypatch):
    """The quickstart has perplexities of text and losses on copies; an experiment that was killed at once has none."""
    output = tmp_path / "kinds"
    work("+experiment=quickstart", "data=pg19", "task=evaluate", f"output={output}")
    work.fail_at, work.error = "per_head_2048_k2", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        work("+experiment=table2_granularity", "row=per_head_2048_k2", f"output={output}")
    work.fail_at = None
    work("model=landmark", "eval.task=copy", "eval.length=800", "eval.prompts=2", f"output={output}")
    work("model=landmark", "eval.length=800", f"output={output}")
    monkeypatch.setattr(work, "output", output)
    found = page_content(*work.launches())
    first, *others = found["sections"]
    assert first["name"] == "quickstart"
    assert sorted(each["title"].split(" of ")[0] for each in others) == ["Other rows: copies", "Other rows: text"]
    assert first["headline"][0] == "twice_landmarks against twice_last_blocks"  # and not a text that comes once
    at = [column["title"] for column in first["columns"]].index("vs first row, nats")
    differences = [row["cells"][at] for row in first["rows"]]
    assert differences[0] == differences[3] == "-"  # the first row of each kind
    assert differences[4][:2] not in ("-", "")
