"""A real Chromium without a window: what a person would do with a page, and what the page did besides."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = "chromium", "chromedriver"  # Debian's packages chromium and chromium-driver
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


class Browser:
    """One window."""

    def __init__(self, profile: Path) -> None:
        """profile: an empty folder. Skips the test, saying so, where a program is missing."""
        found = [shutil.which(program) for program in PROGRAMS]
        if missing := [name for name, path in zip(PROGRAMS, found) if path is None]:
            pytest.skip(f"no {' and no '.join(missing)} on this machine: the page is not tested in a browser")
        from selenium.webdriver import Chrome, ChromeOptions, ChromeService

        options = ChromeOptions()
        options.binary_location, driver = (str(path) for path in found)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=ChromeService(driver))  # a path: selenium looks for none

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file, or an address, in a window of so many pixels; a narrow one is a phone's."""
        self._command("Emulation.setEmulatedMedia", features=[_scheme(dark)])
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.errors(), self.requests()  # of the page before
        self.driver.get("about:blank")
        self.driver.get(page if isinstance(page, str) else page.resolve().as_uri())

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def click(self, selector: str) -> None:
        """Click the first element that a CSS selector finds, as a person would: it must be seen."""
        self.driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(text)

    def texts(self, selector: str) -> list[str]:
        """Text, as it is shown, of all elements that a CSS selector finds; hidden ones have none."""
        found = "[...document.querySelectorAll(arguments[0])]"
        return self.js(f"return {found}.map(each => (each.innerText ?? each.textContent).trim())", selector)

    def errors(self) -> list[str]:
        """What the page said on the console since it was asked last, warnings and errors."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def requests(self) -> list[str]:
        """Addresses that were asked for since it was asked last; the page itself is one."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if each["request"]["url"] != "about:blank"]

    def close(self) -> None:
        self.driver.quit()

    def _command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)


def _scheme(dark: bool) -> dict[str, str]:
    return {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
