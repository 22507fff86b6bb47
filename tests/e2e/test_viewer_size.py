"""A run of a gigabyte in the viewer: how soon the first view and an episode are there, and how much memory the server takes.

Bounds are on the CPU time of the server, which is what the clock shows on a machine that has nothing else to do; both are printed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.large_run import MEMBERS, large_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SIZE = 10**9


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_run(tmp_path_factory.mktemp("large") / "run", size=SIZE)


@pytest.fixture
def served(large: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    process = subprocess.Popen([sys.executable, "-m", "agentrl", "view", str(large), "--no-browser"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        with httpx.Client(base_url=process.stdout.readline().strip(), timeout=60) as client:
            yield client, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def timed(client: httpx.Client, path: str) -> tuple[float, dict]:
    begin = time.perf_counter()
    answer = client.get(path)
    seconds = time.perf_counter() - begin
    assert answer.status_code == 200, answer.text
    return seconds, answer.json()


def worked(process: psutil.Process) -> float:
    """CPU seconds of the server so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def first_view(client: httpx.Client) -> float:
    """Seconds for all that the view of a run asks for, one after the other."""
    paths = ("api/runs", "api/run/run", "api/run/run/metrics?points=1000", "api/run/run/episodes?limit=50")
    return sum(timed(client, path)[0] for path in paths)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_gigabyte_opens_at_once(large: Path, served: tuple[httpx.Client, psutil.Process], indexed: bool) -> None:
    client, process = served
    index, aside = large / "trajectories.index.jsonl", large / "aside"
    if not indexed:
        index.rename(aside)
    try:
        before = worked(process)
        opened = first_view(client)
        opened_cpu = worked(process) - before
        of = sum(1 for _ in (large / "trajectories.jsonl").open("rb"))
        last = of // MEMBERS - 1 if indexed else 0
        before = worked(process)
        episodes = [timed(client, f"api/run/run/episode/{max(0, last - place)}-0-3")[0] for place in range(3)]
        episode_cpu = (worked(process) - before) / len(episodes)
        during = process.memory_info().rss / 1e6
        deadline = time.monotonic() + 600
        while not (changes := timed(client, "api/run/run/changes")[1])["index"]["done"]:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        page = timed(client, f"api/run/run/episodes?limit=50&sort=-reward&offset={of // 2}")[0]
        polled = min(timed(client, "api/run/run/changes")[0] for _ in range(5))
        step = timed(client, "api/run/run/step/5")[0]
        tokens = timed(client, "api/run/run/step/5/tokens?by=loss")[0]
        tasks = timed(client, "api/run/run/tasks")[0]
        memory = process.memory_info().rss / 1e6
        figures = {"first view": opened, "episode": max(episodes), "page by reward": page, "step": step, "tokens": tokens, "tasks": tasks}
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in figures.items())
        print(f"\nindex {indexed}, {of} episodes: CPU {opened_cpu:.2f} s for the first view, {episode_cpu:.3f} s for an episode")
        print(f"{seconds}; changes {1000 * polled:.1f} ms; memory {during:.0f}, {memory:.0f} MB")
        assert changes["episodes"] == of
        assert opened_cpu < 2.0
        assert episode_cpu < 0.3 or not indexed  # without an index the server reads the rest of the file at the same time
        assert memory < 300
    finally:
        if aside.exists():
            aside.rename(index)
