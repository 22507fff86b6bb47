"""A run of a gigabyte in the viewer: how soon the first view and an episode are there, and how much memory the server takes.

Bounds are on the CPU time of the server, which is what the clock shows on a machine that has nothing else to do; both are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from agentrl.track.index import scan_records, write_index
from tests.run_files import MadeRun, annotation_of, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SIZE = 10**9
GROUPS_PER_STEP, MEMBERS = 16, 8
TURNS, TOKENS = 4, 200


def large_run(folder: Path, size: int = SIZE) -> Path:
    """A run with episodes of 800 sampled tokens until its file of trajectories has the size, and with annotations of all of them."""
    made = MadeRun(folder, num_steps=100_000)
    made.group(1, members=1, turns=TURNS, tokens=TOKENS)
    made.close()
    [record] = read(folder / "trajectories.jsonl")
    template, [judged] = json.dumps(record), read(folder / "groups.jsonl")
    note = annotation_of(record, 1).line()
    steps = max(1, size // len(template) // (GROUPS_PER_STEP * MEMBERS))
    with (
        (folder / "trajectories.jsonl").open("w") as records,
        (folder / "annotations.jsonl").open("w") as notes,
        (folder / "groups.jsonl").open("w") as groups,
        (folder / "steps.jsonl").open("w") as lines,
        (folder / "metrics.jsonl").open("w") as metrics,
    ):
        for step in range(1, steps + 1):
            numbers = range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)
            for group in numbers:
                names = [f"{group}-0-{member}" for member in range(MEMBERS)]
                for name in names:
                    own = template.replace('"0-0-0"', f'"{name}"').replace('"group_id": 0', f'"group_id": {group}')
                    records.write(own.replace('"version": 0', f'"version": {step - 1}') + "\n")
                    notes.write(note.replace('"0-0-0"', f'"{name}"').replace('"step": 1', f'"step": {step}') + "\n")
                about = {"group_id": group, "task_id": f"task-{group % 500}", "version": step - 1, "episodes": names}
                about |= {"rewards": [1.0, 0.0] * (MEMBERS // 2), "scores": [1.0, 0.0] * (MEMBERS // 2)}
                groups.write(json.dumps({**judged, **about, "ended_s": judged["ended_s"] + group}) + "\n")
            begin_s = judged["ended_s"] + numbers[0]
            lines.write(json.dumps({"step": step, "groups": list(numbers), "begin_s": begin_s, "trained_s": begin_s + 16}) + "\n")
            metrics.write(json.dumps({"step": step, "reward/mean": 0.5, **{f"metric/{place}": step / 7 for place in range(100)}}) + "\n")
    write_index(folder / "trajectories.jsonl", scan_records(folder / "trajectories.jsonl"))
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_run(tmp_path_factory.mktemp("large") / "run")


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
