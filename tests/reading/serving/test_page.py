"""The page in a real Chromium: a book is put in, read, asked and looked up, and whatever it holds stays text."""

import os

import httpx
import pytest

from landmark.reading.serving import app
from landmark.reading.serving.page import FILES
from tests import forked
from tests.documents.files import pdf
from tests.models.huggingface.conftest import FREE, wrapped_model
from tests.reading.serving.conftest import KEYS, Server

pytestmark = pytest.mark.timeout(900)

HOSTILE = "<script>ran = 1</script><img src=x onerror='ran = 1'>"
TEXT = f"🪶 Zwölf Reiher warten. {HOSTILE} The heron waits. " * 12
WIDTHS = {"desktop": {}, "phone": {"width": 360, "height": 740, "dark": True}}


def wait_for(found):
    forked.wait_for(found, 40)


@pytest.fixture
def running(slow, tokenizer, tmp_path):
    with Server(wrapped_model("llama", **FREE), tokenizer, tmp_path / "memories") as server:
        yield server


@pytest.fixture
def opened(browser, running, request):
    """The page of a server, with its key typed in."""
    browser.open(running.url.removesuffix("v1"), **WIDTHS[getattr(request, "param", "desktop")])
    browser.js("sessionStorage.clear(); location.hash = ''; location.reload()")
    wait_for(lambda: browser.js("return document.querySelector('#key').open"))
    press(browser, KEYS[0], "ENTER")
    wait_for(lambda: browser.js("return document.querySelector('#model').textContent"))
    yield browser
    assert browser.errors() == []
    assert all(address.startswith(running.url.removesuffix("v1")) for address in browser.requests())


def press(browser, *keys):
    """Press keys, or type texts, where the focus is."""
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        browser.driver.switch_to.active_element.send_keys("".join(getattr(Keys, part, part) for part in key.split("+")))


def shown(browser, selector):
    return " ".join(browser.texts(selector))


def is_seen(browser, selector):
    return browser.js("return document.querySelector(arguments[0]).checkVisibility()", selector)


def picture(browser, name):
    """Kept where PICTURES says, to be looked at."""
    if folder := os.environ.get("PICTURES"):
        browser.driver.save_screenshot(f"{folder}/{name}-{browser.js('return innerWidth')}.png")


def focused(browser):
    return browser.js("return document.activeElement.id || document.activeElement.textContent")


def put(browser, path, text=TEXT):
    path.write_text(text)
    browser.type("#file", str(path))


@pytest.mark.parametrize("opened", WIDTHS, indirect=True)
def test_a_book_is_put_in_read_asked_and_looked_up_by_keys_alone(opened, running, tmp_path):
    narrow, at = opened.js("return innerWidth") < 600, []

    def look():
        at.append(opened.js("return document.documentElement.scrollWidth - innerWidth"))

    assert shown(opened, "#welcome h1") == "Put a book in"
    put(opened, tmp_path / "Größe.txt")
    wait_for(lambda: " a second · " in shown(opened, "#readings small"))
    assert f" of {len(TEXT.encode())} tokens" in shown(opened, "#readings small").replace(",", "")
    look()
    picture(opened, "reading")
    before = running.http().get("/readings").json()["data"][0]
    opened.js("location.reload()")  # and it is read on
    wait_for(lambda: " a second · " in shown(opened, "#readings small"))
    after = running.http().get("/readings").json()["data"][0]
    assert (before["id"], after["id"], before["tokens"]) == ("Gro-e.txt", "Gro-e.txt", after["tokens"])
    assert 0 < before["read"] < after["read"]
    wait_for(lambda: shown(opened, "#talk h1") == "Gro-e.txt")
    assert not opened.texts("#readings li")
    rows = "['#turns', '#ask'].map((each) => document.querySelector(each).getBoundingClientRect().top)"
    assert opened.js(f"const [turns, ask] = {rows}; return turns < ask")
    assert running.http().get("/documents").json()["data"][0]["id"] == "Gro-e.txt"
    look()
    assert is_seen(opened, "nav") is not narrow
    if narrow:
        opened.js("document.querySelector('#question').focus()")
    press(opened, "Wer wartet?", "ENTER")
    wait_for(lambda: shown(opened, ".answer"))
    first = shown(opened, ".answer")
    assert focused(opened) == "question"
    assert opened.js("return document.querySelector('#turns').ariaBusy") == "true"
    wait_for(lambda: opened.js("return document.querySelector('#turns').ariaBusy") == "false")
    asked = {"document": "Gro-e.txt", "messages": [{"role": "user", "content": "Wer wartet?"}]}
    answer = running.http().post("/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert shown(opened, ".answer") == answer.strip()
    assert len(first) < len(answer)
    look()
    asked |= {"sources": 3, "max_tokens": 1}
    sources = running.http().post("/chat/completions", json=asked).json()["choices"][0]["sources"]
    assert len(sources) > 1
    assert opened.texts(".sources a > span") == [" ".join(each["text"].split()) for each in sources]
    press(opened, "SHIFT+TAB", "ENTER")  # the last source stands before the field of the question
    wait_for(lambda: shown(opened, "mark") == sources[-1]["text"])
    assert shown(opened, "#place") == sources[-1]["place"].capitalize()
    assert focused(opened) == "place"
    assert opened.js("return document.querySelector('#passage').textContent") == TEXT
    look()
    press(opened, "ESCAPE")
    wait_for(lambda: not is_seen(opened, "#source"))
    assert sources[-1]["text"] in focused(opened)
    opened.click("#alone input")
    opened.type("#question", "Wer wartet?\n")
    wait_for(lambda: len(opened.texts(".sources")) == 2)
    asked["messages"] += [{"role": "assistant", "content": answer}, asked["messages"][0]]
    asked |= {"sources": 3, "from_sources": True, "max_tokens": None}
    alone = running.http().post("/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert opened.texts(".answer")[1] == alone.strip()
    look()
    picture(opened, "talk")
    talk = [opened.texts(each) for each in ("article h2", ".answer", ".support", ".sources b", ".sources a > span")]
    opened.js("location.reload()")
    wait_for(lambda: len(opened.texts(".sources")) == 2)
    again = [opened.texts(each) for each in ("article h2", ".answer", ".support", ".sources b", ".sources a > span")]
    assert again == talk
    picture(opened, "again")
    opened.type("#question", "Who waits?\n")
    wait_for(lambda: shown(opened, "article:last-child .answer"))
    opened.js("location.reload()")  # within an answer
    wait_for(lambda: shown(opened, "article:last-child .dim") == "Stopped.")
    assert opened.texts("article h2") == ["Wer wartet?", "Wer wartet?", "Who waits?"]
    assert opened.js("return self.ran ?? document.querySelectorAll('#passage *:not(mark), main img').length") == 0
    assert all(more <= 0 for more in at), "the page is wider than its window"


def test_documents_are_asked_together_and_what_is_missing_and_how_sure_it_is_are_said(browser, running):
    """The address that the server prints has the key. A passage of another document is shown in its place."""
    http = running.http()
    http.put("/documents/lease.pdf", content=pdf("The landlord is Osgood. " * 4, "▣"))
    http.put("/documents/letter.txt", content=b"Herons wait. The rent is late. " * 6)
    browser.open(f"{running.url.removesuffix('v1')}#key={KEYS[0]}")
    wait_for(lambda: len(browser.texts("#documents a")) == 2)
    assert KEYS[0] not in browser.js("return location.href")
    assert "not all of its text" in browser.texts("#documents a")[0]
    browser.click("#documents a")
    lacks = "lease.pdf: page 2 has no text, but pictures: ocrmypdf adds the text of scans"
    assert shown(browser, "#lacks") == lacks
    for selector in ("#others summary", "#others input", "#alone input"):
        browser.click(selector)
    browser.js("URL.createObjectURL = (blob) => (blob.text().then((text) => (self.kept = text)), 'blob:kept')")
    browser.type("#question", "What is late?\n")
    wait_for(lambda: shown(browser, "article .lacks") == f"Not in the text: {lacks}")
    asked = {"documents": ["lease.pdf", "letter.txt"], "documents_read": "apart", "sources": 3, "from_sources": True}
    asked |= {"messages": [{"role": "user", "content": "What is late?"}]}
    choice = http.post("/chat/completions", json=asked).json()["choices"][0]
    assert choice["support"]["said"] in shown(browser, ".support")
    places = [each["place"] + " of letter.txt" * (each["document"] == "letter.txt") for each in choice["sources"]]
    assert browser.texts(".sources b") == places
    number = next(n for n, each in enumerate(choice["sources"]) if each["document"] == "letter.txt")
    browser.js("document.querySelectorAll('.sources a')[arguments[0]].click()", number)
    wait_for(lambda: shown(browser, "mark") == choice["sources"][number]["text"])
    assert shown(browser, "#talk h1") == "lease.pdf"
    kept = browser.js("return self.kept")
    assert kept.startswith(f"# What is late?\n\n{browser.texts('.answer')[0]}\n\nIs it in the text? ")
    assert all(f", {each['place']}\n\n> {each['text'][:12]}" in kept for each in choice["sources"])
    browser.click("#anew")
    assert not browser.texts("article")
    assert not is_seen(browser, "#anew")


def test_answers_and_readings_are_stopped_and_documents_deleted(opened, running, tmp_path):
    put(opened, tmp_path / "book.txt", "The heron waits.")
    wait_for(lambda: shown(opened, "#talk h1") == "book.txt")
    opened.type("#question", "Who waits?\n")
    wait_for(lambda: shown(opened, ".answer"))
    opened.click("#stop")
    wait_for(lambda: shown(opened, "article .dim") == "Stopped.")
    assert 0 < len(shown(opened, ".answer")) < 40
    put(opened, tmp_path / "book.txt")
    wait_for(lambda: shown(opened, "#readings progress + small").endswith(" left"))
    assert shown(opened, "#readings span") == "book-2.txt"
    opened.click("#readings button")
    wait_for(lambda: not opened.texts("#readings li"))
    opened.js("""const data = new DataTransfer(), event = {bubbles: true, cancelable: true, dataTransfer: data};
        data.items.add(new File([], "none.txt")), document.body.dispatchEvent(new DragEvent("drop", event))""")
    wait_for(lambda: "is empty" in shown(opened, "#readings .error"))
    assert [each["id"] for each in running.http().get("/documents").json()["data"]] == ["book.txt"]
    opened.click("#readings button")
    odd = "It was 20° in the shade.\n" + "It was a day like others.\n" * 9
    (tmp_path / "odd.txt").write_bytes(odd.encode("mac-roman"))
    opened.type("#file", str(tmp_path / "odd.txt"))
    wait_for(lambda: any("It was 20° in" in each for each in opened.texts(".guess")))
    picture(opened, "encodings")
    guesses = opened.texts(".guess")
    right = next(number for number, each in enumerate(guesses) if "20° in" in each)
    opened.js("document.querySelectorAll('.guess button')[arguments[0]].click()", right)
    wait_for(lambda: "odd.txt" in opened.texts("#documents a > span"))
    assert running.http().get("/documents/odd.txt/text").json()["text"] == odd
    assert len(guesses) > 1
    assert not opened.texts("#readings li")
    running.http().delete("/documents/odd.txt")
    opened.click("#delete")
    opened.click("#delete")
    wait_for(lambda: not opened.texts("#documents a"))
    assert running.http().get("/documents").json()["data"] == []
    assert any("400" in error for error in opened.errors()), "of the empty file"


def test_a_wrong_key_is_asked_for_again_and_what_is_injected_does_not_run(browser, running):
    browser.open(running.url.removesuffix("v1"))
    browser.js("sessionStorage.clear(); location.reload()")
    wait_for(lambda: browser.js("return document.querySelector('#key').open"))
    press(browser, "another", "ENTER")
    wait_for(lambda: shown(browser, "#key-error") == "the API key is missing or wrong")
    assert browser.js("return sessionStorage.length + localStorage.length + document.cookie.length") == 0
    script = "const made = document.createElement('script'); made.append('window.ran = 1'); document.body.append(made);"
    browser.js(f"try {{ {script} }} catch {{}} try {{ document.body.innerHTML += arguments[0] }} catch {{}}", HOSTILE)
    assert browser.js("return window.ran") is None
    errors = " ".join(browser.errors())
    assert all(said in errors for said in ("will not be executed", "requires 'TrustedHTML'"))


def test_the_page_needs_no_key_and_texts_do(server, http, monkeypatch):
    for path in FILES:
        found = httpx.get(server.url.removesuffix("/v1") + path)
        assert found.status_code == 200
        assert found.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    http.put("/documents/heron", content="🪶 A heron.".encode())
    monkeypatch.setattr(app, "PART", 8)
    for asked, start, end, text in (
        ("", 0, 8, "🪶 A hero"),
        ("?start=4&end=99", 4, 10, "heron."),
        ("?start=50", 10, 10, ""),
    ):
        part = {"start": start, "end": end, "length": 10, "text": text}
        assert http.get(f"/documents/heron/text{asked}").json() == {"id": "heron", "object": "document.text", **part}
    assert httpx.get(f"{server.url}/documents/heron/text").status_code == 401
    assert server.http(KEYS[1]).get("/documents/heron/text").status_code == 404
    assert "start" in http.get("/documents/heron/text?start=-1").json()["error"]["message"]
