"""The page as one file, opened from disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.viewer.collect import single_page

if TYPE_CHECKING:
    from tests.browser.conftest import Watched

HOSTILE = '<script>alert("s")</script><img src=x onerror=alert("i")><b>bold</b>'


def turn() -> dict[str, Any]:
    pieces = [HOSTILE, " and", " more"]
    tokens = {
        "ids": [5, 6, 7],
        "pieces": pieces,
        "exact": True,
        "logprob": [-0.1, -3.5, -0.5],
        "version": 2,
        "mask": "trained",
        "advantage": 0.25,
    }
    return {
        "turn": 0,
        "number": 0,
        "trajectory": 0,
        "branch": 0,
        "agent": "",
        "fresh": True,
        "prompt_text": HOSTILE,
        "text": "".join(pieces),
        "prompt_messages": [{"role": HOSTILE, "text": HOSTILE}],
        "finish_reason": HOSTILE,
        "reward": 1.0,
        "reward_parts": {HOSTILE: 1.0},
        "temperature": 1.0,
        "info": {HOSTILE: 2.0},
        "prompt": {"ids": [1], "pieces": [HOSTILE]},
        "tokens": tokens,
        "masked": HOSTILE,
    }


def answers() -> dict[str, Any]:
    run = {"id": "a", "name": HOSTILE, "status": "finished", "steps": 0, "episodes": 1, "command": HOSTILE, "tags": [HOSTILE]}
    one = {"id": "1-0-0", "agent": HOSTILE, "reward": 1.0, "score": 1.0, "reward_parts": {}, "mask": "trained", "trained_step": 3}
    episode = {
        "episode": "1-0-0",
        "group": 1,
        "attempt": 0,
        "attempts": [0],
        "version": 2,
        "step": 3,
        "status": "finished",
        "source": "train",
        "error": HOSTILE,
        "task": {"id": HOSTILE, "label": HOSTILE, "metadata": {HOSTILE: HOSTILE}, "images": 1},
        "trajectories": [one],
        "branches": [],
        "turns": [turn()],
        "spans": [{"name": HOSTILE, "turn": 0, "start_s": 0.0, "seconds": 0.1}],
        "fields": ["logprob", "advantage", "version"],
        "masks": {"trained": "trained"},
        "ranges": {"logprob": [-3.5, -0.1], "advantage": [0.25, 0.25], "version": [2, 2]},
        "commands": {"replay": HOSTILE},
        "verdict": "kept",
    }
    return {"api/runs": {"folder": HOSTILE, "runs": [run]}, "api/run/a": run, "api/run/a/episode/1-0-0": episode}


def test_the_file_shows_the_episode_from_disk_and_asks_nothing(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "episode.html"
    path.write_text(single_page(answers(), start="#/run/a/episode/1-0-0"), encoding="utf-8")
    watched.open(path.as_uri(), ".turn")
    assert watched.page.locator("h1").inner_text().startswith("Episode 1-0-0")
    watched.page.locator("[data-token='1']").first.hover()
    assert watched.page.locator("[data-figure='logprob'] td").nth(1).inner_text() == "-3.5"
    assert watched.page.locator("[data-figure='advantage'] td").nth(1).inner_text() == "0.25"
    assert [address for address in watched.asked if not address.startswith(("file:", "about:", "data:,"))] == []


def test_markup_from_a_model_or_an_environment_stays_text(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "episode.html"
    path.write_text(single_page(answers(), start="#/run/a/episode/1-0-0"), encoding="utf-8")
    for place in ("#/", "#/run/a", "#/run/a/episode/1-0-0", "#/run/a/episode/1-0-0?form=tokens&colour=mask&find=bold"):
        watched.open(path.as_uri() + place)
        assert watched.page.locator("main img").count() == 0
        assert watched.page.get_by_text("bold", exact=True).locator("xpath=self::b").count() == 0
        assert watched.page.evaluate("[...document.scripts].filter((script) => script.textContent.startsWith('alert')).length") == 0
        assert HOSTILE in (watched.page.locator("main").text_content() or "")


def test_a_part_that_the_file_does_not_hold_says_where_to_see_it(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "episode.html"
    path.write_text(single_page(answers(), start="#/run/a/step/3"), encoding="utf-8")
    watched.open(path.as_uri(), ".empty")
    assert "Open the run itself with `agentrl view`" in watched.page.locator(".empty").inner_text()


def test_images_are_shown_if_they_are_data(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "episode.html"
    pixel = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
    for given, shown in ((pixel, 1), ("https://example.org/a.png", 0)):
        path.write_text(single_page({**answers(), "api/run/a/image/1-0-0/0": given}, start="#/run/a/episode/1-0-0"), encoding="utf-8")
        watched.open(path.as_uri(), ".turn")
        assert watched.page.locator(".images img").count() == shown
        assert watched.page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth === 1)")
    assert not [address for address in watched.asked if address.startswith("http")]
