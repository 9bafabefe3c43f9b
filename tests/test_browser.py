"""The browser of the tests sees what a page does: a click, an error, a request, the colours it is asked for."""

from pathlib import Path

import pytest

PAGE = """<!doctype html><meta charset="utf-8"><title>a page</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<button onclick="this.textContent = 'pressed'">press</button><input id="said">
<script>if (location.hash) { fetch("missing.json").catch(() => 0); console.error("an error") }</script>"""


@pytest.fixture
def page(tmp_path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(PAGE)
    return path


def test_a_page_is_clicked_typed_into_and_pictured(browser, page, tmp_path):
    browser.open(page, width=400, height=300, dark=True)
    browser.click("button")
    browser.type("#said", "words")
    assert browser.texts("button") == ["pressed"]
    assert browser.js("return document.querySelector(arguments[0]).value", "#said") == "words"
    assert browser.js("return [innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [400, True]
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert browser.errors() == []
    assert browser.requests() == [page.as_uri()]


def test_errors_and_requests_are_noticed(browser, page):
    browser.open(page)
    browser.js("location.hash = 'loud'; location.reload()")
    browser.js("return new Promise(done => setTimeout(done, 200))")
    assert any("an error" in error for error in browser.errors())
    assert any(address.endswith("missing.json") for address in browser.requests())


def test_without_chromium_it_says_so(monkeypatch, tmp_path):
    from tests import browser

    monkeypatch.setattr(browser.shutil, "which", lambda program: None)
    with pytest.raises(pytest.skip.Exception, match="no chromium and no chromedriver on this machine"):
        browser.Browser(tmp_path)
