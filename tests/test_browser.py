"""The browser of the tests sees the errors and requests of a page, and says where there is no browser."""

import pytest

PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<script>if (location.hash) { fetch("missing.json").catch(() => 0); console.error("an error") }</script>"""


def test_errors_and_requests_are_noticed(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(PAGE)
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
