"""task=report: one page that a browser shows from a file, with what the records hold and nothing from elsewhere."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from landmark.results.page import page_content
from landmark.utils.errors import UserError
from tests.workplace import Workplace

HOSTILE = "</script><script>document.title = 'taken'</script><b id=taken>&amp;"


class Page(HTMLParser):
    """Texts by their element, the cells of each table, and every address and script that a browser would follow."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.texts, self.pictures, self.addresses, self.scripts, self.ids = [], {}, [], [], 0, []
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in ("meta", "link", "img", "br"):
            self._open.append((tag, given.get("class")))
        self.scripts += tag == "script" or any(name.startswith("on") for name in given)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[name] for name in ("src", "href") if name in given]
        self.pictures += [given["src"]] if tag == "img" else []
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if not self._open:
            return
        (tag, kind), text = self._open[-1], data.strip()
        if tag in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if text:
            self.texts.setdefault(kind or tag, []).append(text)


@pytest.fixture(scope="module")
def work(books, tmp_path_factory):
    """Table 1, the sweep, a row of the quickstart and a free row with a hostile name; one record is cut short."""
    with pytest.MonkeyPatch.context() as patch:
        work = Workplace(books, tmp_path_factory.mktemp("report") / "outputs", patch)
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
    return Page((work.output / "report.html").read_text())


def test_page_says_what_was_measured_and_what_a_record_holds_is_text(page, work):
    assert page.texts["h2"] == [
        "quickstart",
        "Sweep: blocks retrieved against local context",
        "Table 1, PG-19: perplexity with memory",
        "Other rows: text of pg19, nano, bytes",
    ]
    table1 = page.tables[2]
    assert [len(table) - 1 for table in page.tables] == [1, 13, 13, 1]
    first = dict(zip(table1[0], table1[1], strict=True))
    assert (first["row"], first["paper"], first["poster"]) == ("plain_512", "16.32", "16.12")
    assert first["perplexity"] == "7.32 ± 0.01"
    notes = page.texts["li"]
    assert any("landmark_2048_k4 is better than plain_512" in note for note in notes)
    assert any("landmark_2048_k4 and xl_2048 do not differ" in note for note in notes)
    assert any(note.startswith("measured at commit ") for note in notes)
    (problem,) = page.texts["problem"]
    assert problem.startswith(f"{work.damaged} is not valid JSON, cut short")
    (missing, *_) = [text for text in page.texts["p"] if text.startswith("No record yet: ")]
    assert "twice_last_blocks, twice_landmarks, twice_second_look, " in missing
    assert f"output={work.output}" in page.texts["code"][0].split()
    assert page.tables[-1][1][0] == HOSTILE
    assert "taken" not in page.ids
    assert any(HOSTILE in note for note in page.texts["li"])


def test_pictures_are_inside_and_a_browser_runs_and_fetches_nothing(page, work):
    assert len(page.pictures) == 3
    for picture in page.pictures:
        kind, _, data = picture.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert page.scripts == 0
    assert all(address.startswith(("data:", "#s")) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address.startswith("#")} == set(page.ids)
    text = (work.output / "report.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert "unsafe" not in policy
    assert policy.startswith("default-src &#39;none&#39;; ")


def test_one_experiment_has_a_page_of_its_own_and_one_without_records_none(work, capsys):
    work.task("+experiment=quickstart", "task=report", f"output={work.output}")
    assert re.search(r"^written: \S+report-quickstart\.html, \d+ kB$", capsys.readouterr().out, re.MULTILINE)
    text = (work.output / "report-quickstart.html").read_text()
    assert "plain_512" in text
    assert "k1_local150" not in text
    contents, _ = work.launches()
    one = replace(contents, runs=dict([*contents.runs.items()][:1]), rows={})
    assert page_content(one, [])["counts"] == "1 run and 0 rows"
    for words in (("+experiment=quickstart", "size=small"), ("+experiment=masked_lm",)):
        said = r"has no records with these settings, `.*` makes them; there are some of quickstart \(nano, pg19"
        with pytest.raises(UserError, match=f"{words[0].partition('=')[2]} {said}"):
            work.task(*words, "task=report", f"output={work.output}")


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
    first, *others = page_content(*work.launches())["sections"]
    assert first["title"] == "quickstart"
    assert sorted(each["title"].split(" of ")[0] for each in others) == ["Other rows: copies", "Other rows: text"]
    at = [title for title, _ in first["columns"]].index("vs first row, nats")
    differences = [cells[at] for cells in first["rows"]]
    assert differences[0] == differences[3] == "-"  # the first row of each kind
    assert differences[4][:2] not in ("-", "")
