"""A run of 12,000 episodes opens at once: its page, a step and an episode, by the first question to a new server and later.

The clock of a machine that does much else says little: `FACTOR` is allowed beyond what docs/viewer.md says of an idle one, and the figures
are printed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.serving import serve
from tests.large_run import GROUPS_PER_STEP, MEMBERS, large_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EPISODES = 12_032
WITHIN_S, FACTOR = 1.0, 4.0
STEP = EPISODES // MEMBERS // GROUPS_PER_STEP // 2
PLACES = {
    "run": ("#/run/run", ".chart canvas"),
    "step": (f"#/run/run/step/{STEP}", "tr[data-group]"),
    "episode": (f"#/run/run/episode/{(STEP - 1) * GROUPS_PER_STEP}-0-3", ".turn .token"),
    "episodes": ("#/run/run/episodes", "tr[data-episode]"),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_run(tmp_path_factory.mktemp("large") / "run", episodes=EPISODES)


def seconds(browser: Browser, address: str, wait_for: str) -> float:
    """From the beginning of navigation, with empty caches of the browser, until an element is there."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    begun = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector(wait_for)
    found = time.perf_counter() - begun
    context.close()
    return found


@pytest.mark.parametrize("name", PLACES)
def test_twelve_thousand_episodes_open_at_once(browser: Browser, large: Path, name: str) -> None:
    place, wait_for = PLACES[name]
    with serve(large) as served:
        first, *later = (seconds(browser, served.address + place, wait_for) for _ in range(3))
    print(f"{name}: {first:.2f} s by the first question to a server, then {', '.join(f'{each:.2f}' for each in later)} s")
    assert first < WITHIN_S * FACTOR
    assert min(later) < WITHIN_S * FACTOR
