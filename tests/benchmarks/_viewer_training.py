"""Pairs of equal training runs, one as plain as it can be and one with annotations and a page that follows it."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil

from tests.e2e.runs import ENVS, succeeded, train

POLL_S = 1.0
"""Time between two questions of a page that follows a run (agentrl/viewer/static/api.js)."""
SIZES = ("--groups-per-step", "8", "--n-samples-per-prompt", "4", "--max-new-tokens", "32", "--learning-rate", "1e-5")
RUN = ("--runtime", "local", "--no-save-model", "--seed", "3", "--record")
LIMIT_S = 400.0


@dataclass
class Follower:
    """Asks a server what an open page asks: for changes each second, and after a change for the views that are open."""

    address: str
    run: str
    asked: int = 0
    steps: int = 0  # that it has seen
    problems: list[str] = field(default_factory=list)
    core: float = 0.0  # share of a core that the server took meanwhile
    _ended: threading.Event = field(default_factory=threading.Event)

    def follow(self) -> None:
        """Ask until `end`."""
        place, version = f"api/run/{quote(self.run)}", ""
        with httpx.Client(base_url=self.address, timeout=30) as client:
            for path in ("", "static/main.js", "api/runs"):
                client.get(path)
            while not self._ended.wait(POLL_S):
                answer = client.get(f"{place}/changes")
                self.asked += 1
                if answer.status_code == 404:  # its directory is not made yet
                    continue
                if answer.status_code != 200:
                    self.problems.append(answer.text)
                    return
                changes = answer.json()
                if changes["version"] != version:
                    version, self.steps = changes["version"], changes["steps"] or 0
                    self._look(client, place)

    def _look(self, client: httpx.Client, place: str) -> None:
        """The run with its six curves, as the page has them open."""
        client.get(place)
        first = client.get(f"{place}/metrics?names=reward/mean").json()
        if "main" in first:
            client.get(f"{place}/metrics?names={','.join(first['main'])}")
        self.asked += 3

    def end(self) -> None:
        """Let `follow` return."""
        self._ended.set()


@contextmanager
def followed(folder: Path, run: str) -> Iterator[Follower]:
    """A server on a folder, and a follower of one of its runs."""
    words = [sys.executable, "-m", "agentrl", "view", str(folder), "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        follower = Follower(server.stdout.readline().strip(), run)
        thread = threading.Thread(target=follower.follow)
        process, begin_s = psutil.Process(server.pid), time.monotonic()
        before = process.cpu_times()
        thread.start()
        try:
            yield follower
        finally:
            follower.end()
            thread.join()
            after = process.cpu_times()
            follower.core = (after.user + after.system - before.user - before.system) / (time.monotonic() - begin_s)
            server.terminate()


def step_seconds(folder: Path) -> list[float]:
    """Seconds from the end of each step to the end of the next; the first step, which loads and allocates, is left out."""
    ends = [json.loads(line)["time_s"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [after - before for before, after in itertools.pairwise(ends)]


def annotated_share(folder: Path) -> float:
    """Median share of a step that the learner spends on the annotations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["time/annotate_s"] / row["time/step_s"] for row in rows[1:])


def one_run(folder: Path, name: str, steps: int, record: str, *, looked_at: bool) -> list[float]:
    """Train, and return the times of the steps."""
    words = (*SIZES, *RUN, record, "--num-steps", str(steps))
    agent = ENVS / "calculator.py"
    if not looked_at:
        succeeded(train(folder / name, *words, "--no-annotate", agent=agent, timeout_s=LIMIT_S))
        return step_seconds(folder / name)
    with followed(folder, name) as follower:
        succeeded(train(folder / name, *words, agent=agent, timeout_s=LIMIT_S))
    assert not follower.problems, follower.problems
    assert follower.steps > 1, f"the page saw {follower.steps} steps; take more"
    share = annotated_share(folder / name)
    print(f"  annotations: {100 * share:.2f}% of a step by their own clock; the server: {100 * follower.core:.1f}% of a core", flush=True)
    return step_seconds(folder / name)


def training_cost(pairs: int, steps: int, record: str, folder: Path) -> list[float]:
    """Ratio of the median time of a step, with annotations and a page to without, for each pair of runs; the order alternates."""
    one_run(folder, "warm", 3, record, looked_at=False)  # and a server has something to show before the first run that it follows
    ratios = []
    for pair in range(pairs):
        medians = {}
        for looked_at in (True, False) if pair % 2 else (False, True):
            name = f"{pair}-{'looked' if looked_at else 'plain'}"
            medians[looked_at] = statistics.median(one_run(folder, name, steps, record, looked_at=looked_at))
        ratios.append(medians[True] / medians[False])
        print(f"pair {pair + 1} of {pairs}: {medians[False]:.4f} s, looked at {medians[True]:.4f} s, ratio {ratios[-1]:.4f}", flush=True)
    return ratios
