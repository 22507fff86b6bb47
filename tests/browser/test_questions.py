"""Runs that do not learn, and the clicks after which a reader of the page knows why (docs/viewer.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.browser import record
from tests.browser.serving import serve

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.browser.conftest import Watched


class Clicks:
    """A reader who only clicks."""

    def __init__(self, page: Page) -> None:
        self._page, self.number = page, 0

    def on(self, selector: str, then: str) -> None:
        """Click the first element of `selector`, and wait for another."""
        self.number += 1
        self._page.locator(selector).first.click()
        self._page.wait_for_selector(then)


def test_a_reward_that_cannot_be_reached_is_found(watched: Watched, tmp_path: Path) -> None:
    record.unreachable(tmp_path / "runs")
    with serve(tmp_path / "runs") as served:
        watched.open(served.address, "tr[data-run=sums]")
        clicks = Clicks(watched.page)
        clicks.on("tr[data-run=sums] a", ".sign")
        assert "every group earned the same" in watched.page.locator(".sign").inner_text()
        clicks.on(".sign a", "tr[data-group] .badge:has-text('flat')")
        assert watched.page.locator(".histogram button").count() == 1
        clicks.on("tr[data-group] a", ".member")
        assert {text.split("reward ")[1][0] for text in watched.page.locator(".member header").all_inner_texts()} == {"0"}
        assert clicks.number < 5


def test_a_mask_of_every_token_is_found(watched: Watched, tmp_path: Path) -> None:
    record.masked(tmp_path / "runs")
    with serve(tmp_path / "runs") as served:
        watched.open(served.address, "tr[data-run=masked]")
        clicks = Clicks(watched.page)
        clicks.on("tr[data-run=masked] a", ".sign")
        assert "masks every token" in watched.page.locator(".sign").inner_text()
        clicks.on(".sign a", "table.spike tr[data-token]")
        clicks.on("table.spike tr[data-token] a", ".token.chosen")
        assert watched.page.locator("[data-figure='mask']").inner_text().split() == ["trained", "no"]
        assert watched.page.locator("[data-figure='weight'] td").last.inner_text() == "0"
        assert clicks.number < 5
