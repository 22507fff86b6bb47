"""What is no finished training run of this version: killed runs, evaluations, images, and files that other systems wrote."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from agentrl.inspect.reader import RunReader
from agentrl.inspect.telemetry import export_inspect
from tests.browser import record
from tests.browser.serving import serve
from tests.e2e.runs import start
from tests.run_files import MadeRun, small_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Watched

FILES = Path(__file__).parents[1] / "foreign_files"
"""Made by the real systems: ``inspect.eval`` by tests/clients/inspect_log.py, ``verifiers.jsonl`` by tests/clients/verifiers_results.py."""
SVG = "<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'></svg>"


def first_episode(page: Page) -> str:
    """Open the first run and its first episode by clicks; the text of its turns."""
    page.locator("main a").first.click()
    page.locator("tr[data-episode] a").first.click()
    page.wait_for_selector(".turn")
    return "\n".join(page.locator(".turn").all_inner_texts())


def shown(page: Page, count: int) -> None:
    """Wait until so many images are drawn."""
    page.wait_for_function("(count) => [...document.images].filter((image) => image.naturalWidth > 0).length === count", arg=count)


def url(data: bytes | str, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data if isinstance(data, bytes) else data.encode()).decode()}"


def picture(kind: str) -> bytes:
    """A picture of 8 by 8 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 80, 20)).save(file, kind)
    return file.getvalue()


def test_episodes_of_openrlhf_are_read(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [{"input": "What is 2+2?", "output": "<script>4</script>", "reward": 1.0}, {"input": "And 3+3?", "output": "7", "reward": 0.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"input": "cut o')  # a writer that was stopped
    with serve(path) as served:
        watched.open(served.address, "main a")
        watched.page.locator("main a").first.click()
        watched.page.wait_for_selector("tr[data-episode]")
        assert watched.page.locator("tr[data-episode]").count() == 2
        watched.page.locator("tr[data-episode] a[href*=episode]").last.click()
        watched.page.wait_for_selector(".turn:has-text('What is 2+2?')")  # it is filled after it is there
        text = watched.page.locator(".turn").inner_text()
    assert "<script>4</script>" in text


def test_a_results_file_of_verifiers_is_read(watched: Watched) -> None:
    with serve(FILES / "verifiers.jsonl") as served:
        watched.open(served.address, "main a")
        text = first_episode(watched.page)
        assert "What is 3 + 2?" in text
        assert '"name": "add"' in text  # the call of its tool
        assert "It is 11." in text
        assert "total_tool_calls 1" in watched.page.locator("main").inner_text()
        watched.open(served.address + "#/run/verifiers/tasks", "tr[data-task]")
        assert watched.page.locator("tr[data-task]").count() == 3


def test_a_log_of_inspect_is_read_with_its_image(watched: Watched) -> None:
    with serve(FILES / "inspect.eval") as served:
        watched.open(f"{served.address}#/run/inspect/episode/a-1", ".turn")
        text = watched.page.locator("main").inner_text()
        for words in ("Be brief.", "What is 2+3? <script>alert(1)</script>", '"function": "add"', "reward 1"):
            assert words in text
        shown(watched.page, 1)
        watched.open(f"{served.address}#/run/inspect/episode/b-1", "h1:has-text('b-1')")
        assert "reward 0" in watched.page.locator("main").inner_text()


def test_a_log_that_was_written_for_inspect_is_read(watched: Watched, tmp_path: Path) -> None:
    export_inspect(RunReader(small_run(tmp_path / "run")), tmp_path / "log.json")
    with serve(tmp_path / "log.json") as served:
        watched.open(served.address, "main a")
        assert "How much?" in first_episode(watched.page)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "runs" / "eval-calculator"
    sizes = ("--eval-size", "4", "--eval-samples", "2", "--max-new-tokens", "16", "--baseline", "start")
    agent = str(record.ENVS / "calculator.py")
    process = start("eval", "--agent", agent, *sizes, "--runtime", "local", "--output", str(folder))
    output, _ = process.communicate(timeout=record.LIMIT_S)
    assert process.returncode == 0, output
    return folder


def test_an_evaluation_shows_its_figures_and_leads_to_its_episodes(watched: Watched, measured: Path) -> None:
    found = json.loads((measured / "eval.json").read_text())
    page = watched.page
    with serve(measured.parent) as served:
        watched.open(served.address, "tr[data-run]")
        row = page.locator("tr[data-run]").inner_text()
        assert "evaluation" in row
        assert "finished" in row
        page.locator("tr[data-run] a").click()
        page.wait_for_selector(".before-after tbody tr")
        assert page.locator(".measured tbody tr").count() == 3  # baseline, model, difference
        reward = found["model"]["overall"]["reward"]["value"]
        assert f"{reward:.3g}" in page.locator(".measured tbody tr").nth(1).inner_text()
        assert page.locator(".before-after tbody tr").count() == 4
        page.locator(".before-after tbody td.num a").first.click()
        page.locator("tr[data-episode] a[href*=episode]").first.click()
        page.wait_for_selector(".turn .token")
        page.locator("main a[href*=group]").first.click()
        page.wait_for_selector(".member .token")
        assert page.locator(".member").count() == 2


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = MadeRun(tmp_path_factory.mktemp("pictured") / "pictures")
    images = (
        (0, url(picture("PNG"), "image/png")),
        *((1, url(picture(kind), f"image/{kind.lower()}")) for kind in ("JPEG", "WEBP", "GIF")),
        (1, url(SVG, "image/svg+xml")),
        (1, url("<script>alert(1)</script>", "text/html")),
        (2, url(picture("PNG"), "image/png")),
    )
    run.step(1, [run.group(1, members=1, images=images)])
    return run.close()


def test_images_of_observations_are_inline_and_nothing_else_is(watched: Watched, pictured: Path, tmp_path: Path) -> None:
    saved = tmp_path / "page.html"
    process = start("view", str(pictured), "--html", str(saved))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    with serve(pictured) as served:
        for address in (served.address, saved.as_uri()):
            watched.open(f"{address}#/run/pictures/episode/0-0-0", ".turn .images")
            shown(watched.page, 5)
            turns = watched.page.locator(".turn")
            watched.page.wait_for_function("document.querySelectorAll('.turn .images .empty').length === 2")
            assert [turns.nth(number).locator("img").count() for number in (0, 1)] == [1, 3]
            assert "no turn was sampled after them" in watched.page.locator("main").inner_text()
            assert watched.page.locator("main svg[onload], main script").count() == 0
    refused = [text for text in watched.complaints if "404" in text]
    watched.complaints[:] = [text for text in watched.complaints if text not in refused]
    assert len(refused) == 2  # what is no image, from the server


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that was killed in the middle of its training, with a last line that is cut."""
    words = ("--groups-per-step", "4", "--n-samples-per-prompt", "4", "--max-new-tokens", "16", "--no-save-model", "--skip-checks", "env")
    folder, agent = tmp_path / "runs" / "killed", str(record.ENVS / "calculator.py")
    rest = ("--runtime", "local", "--record", "all", "--num-steps", "1000")
    process = start("train", "--agent", agent, "--run-dir", str(folder), *words, *rest)
    try:
        while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    for name in ("trajectories.jsonl", "annotations.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'{"trajectory_id": "9')
    return folder


def test_a_killed_run_says_how_to_go_on(watched: Watched, killed: Path) -> None:
    with serve(killed.parent) as served:
        watched.open(f"{served.address}#/run/killed", ".chart canvas")
        assert watched.page.locator(".top .badge").inner_text() == "killed"
        assert "agentrl train --resume" in watched.page.locator("main").inner_text()
        watched.open(f"{served.address}#/run/killed/episodes", "tr[data-episode]")
        watched.page.locator("tr[data-episode] a").first.click()
        watched.page.wait_for_selector(".turn .token")
