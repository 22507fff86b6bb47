"""A run on the page while it trains, and the same page saved as one file."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import record
from tests.browser.serving import serve
from tests.e2e.runs import start

if TYPE_CHECKING:
    from tests.browser.conftest import Watched

STEPS = 8
WITHIN_S = 3.0  # as docs/viewer.md says, on an idle machine
BUSY = 5.0  # times as slow may a machine be that does much else


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record.calculator(tmp_path_factory.mktemp("saved") / "runs", steps=3)


def _steps(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_new_steps_appear_while_the_run_trains(watched: Watched, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    words = ("--groups-per-step", "4", "--n-samples-per-prompt", "4", "--max-new-tokens", "16", "--no-save-model", "--skip-checks", "env")
    metrics = folder / "live" / "metrics.jsonl"
    written: dict[int, float] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for step in range(len(written) + 1, _steps(metrics) + 1):
                written[step] = time.monotonic()
            ended.wait(0.02)

    agent = str(record.ENVS / "calculator.py")
    process = start("train", "--agent", agent, "--run-dir", str(folder / "live"), "--runtime", "local", "--num-steps", str(STEPS), *words)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        while not (folder / "live" / "config.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        with serve(folder) as served:
            watched.open(f"{served.address}#/run/live/steps", ".empty")  # no step has ended yet
            seen: dict[int, float] = {}
            for step in range(1, STEPS + 1):
                watched.page.wait_for_selector(f"tr[data-step='{step}']", timeout=120_000)
                seen[step] = time.monotonic()
            watched.page.wait_for_selector(".top .badge:has-text('finished')", timeout=60_000)
            assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.communicate()
        ended.set()
        watcher.join()
    delays = [seen[step] - written[step] for step in range(1, STEPS + 1)]
    print(f"seconds from a step in the file to its row on the page: {[round(delay, 2) for delay in delays]}")
    assert max(delays) < WITHIN_S * BUSY, delays


def test_a_saved_file_shows_the_same_episode_as_the_server(watched: Watched, finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved.html"
    process = start("view", str(finished), "--html", str(path))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    with serve(finished) as served:
        watched.open(f"{served.address}#/run/calculator/episodes", "tr[data-episode]")
        watched.page.locator("tr[data-episode] a").first.click()
        watched.page.wait_for_selector(".turn")
        place = watched.page.evaluate("location.hash")
        shown = watched.page.locator("main .split > div").inner_text()
    watched.asked.clear()
    watched.open(path.as_uri() + place, ".turn")
    assert watched.page.locator("main .split > div").inner_text() == shown
    watched.page.locator(".token").first.hover()
    watched.page.wait_for_selector("#figures")
    assert [address for address in watched.asked if not address.startswith((path.as_uri(), "about:", "data:,"))] == []


def test_markup_in_a_recorded_run_stays_text(watched: Watched, finished: Path, tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    run = tmp_path / "runs" / "hostile"
    run.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        (run / name).write_bytes((finished / name).read_bytes())
    escaped = hostile.replace('"', '\\"')
    lines = (finished / "trajectories.jsonl").read_text().splitlines()[:8]
    lines = [line.replace('"prompt_text": "', f'"prompt_text": "{escaped}').replace('"text": "', f'"text": "{escaped}') for line in lines]
    (run / "trajectories.jsonl").write_text("\n".join(line.replace('"error": null', f'"error": "{escaped}"') for line in lines) + "\n")
    with serve(tmp_path / "runs") as served:
        watched.open(f"{served.address}#/run/hostile/episodes", "tr[data-episode]")
        assert hostile in watched.page.locator("tr[data-episode]").first.inner_text()
        watched.page.locator("tr[data-episode] a").first.click()
        watched.page.wait_for_selector(".turn")
        assert hostile in watched.page.locator("main").inner_text()
        assert watched.page.locator("main img, main script").count() == 0
        watched.page.fill("#search", "onerror=")
        watched.page.press("#search", "Enter")
        watched.page.wait_for_selector("tr[data-match]")
        assert watched.page.locator("main img, main script").count() == 0
