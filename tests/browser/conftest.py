"""A real headless Chromium, and a page in it that writes down what it asks for and what it complains about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import record
from tests.browser.serving import Served, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_MS = 15_000
STEPS = 6
RUNS = 7
SERVER_ENDED = "net::ERR_CONNECTION_REFUSED"  # a page that outlives its server goes on to ask it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


def chromium() -> str:
    """Path of the Chromium to use: the variable ``CHROMIUM``, else the first of its usual names; empty if there is none."""
    return os.environ.get("CHROMIUM", "") or next((path for name in NAMES if (path := shutil.which(name))), "")


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser without a window, until the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")  # Playwright runs an event loop in this thread until it ends, and later tests need their own
def browser() -> Iterator[Browser]:
    if not chromium():
        pytest.skip("there is no Chromium: apt-get install chromium, or name one in the variable CHROMIUM")
    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("BROWSER_RUNS", "") or tmp_path_factory.mktemp("browser") / "runs")  # a folder that keeps them
    record.calculator(folder, steps=STEPS)
    record.negotiation(folder)
    record.branching(folder)
    record.tools(folder)
    record.tuned(folder)
    return folder


@pytest.fixture(scope="session")
def served(runs: Path) -> Iterator[Served]:
    with serve(runs) as served:
        yield served


@dataclass
class Watched:
    """A page, the addresses that it asked for, and what it complained about: errors of scripts and refusals of the content policy."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, address: str, wait_for: str = "main > *") -> None:
        """Load an address from scratch, and wait for an element."""
        self.page.goto("about:blank")
        self.page.goto(address)
        self.page.wait_for_selector(wait_for)


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    found = Watched(page)
    page.on("request", lambda request: found.asked.append(request.url))
    page.on("pageerror", lambda error: found.complaints.append(f"error: {error}"))
    page.on("console", lambda message: found.complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("dialog", lambda dialog: (found.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    yield found
    context.close()
    assert [text for text in found.complaints if SERVER_ENDED not in text] == []


@pytest.fixture
def page(watched: Watched, served: Served) -> Iterator[Page]:
    watched.open(served.address, "tr[data-run]")
    yield watched.page
    assert [address for address in watched.asked if not address.startswith((served.address, "about:", "data:,"))] == []
