"""2,000 steps on a scripted engine: nothing grows."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.faults.report import Saw

STEPS = 2000


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.row(18, "2,000 steps with a scripted engine and learner, everything else real")
def test_nothing_grows(tmp_path: Path, saw: Saw) -> None:
    words = [sys.executable, "-m", "tests.faults.long_run", str(tmp_path), str(STEPS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=800)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    rows = report["rows"]
    assert len(rows) == report["steps"] // 10 == STEPS // 10
    early, late = rows[20:30], rows[-10:]  # from step 200 on, and the last 100
    memory, files, tasks, threads = ([statistics.median(row[i] for row in part) for part in (early, late)] for i in range(4))
    (begin, end), (files_200, files_end), (tasks_200, tasks_end), (threads_200, threads_end) = memory, files, tasks, threads
    assert begin > 50 * 2**20
    growth = end / begin - 1
    ledger = report["ledger"]
    assert growth < 0.05, f"{begin / 2**20:.1f} MiB at step 200, {end / 2**20:.1f} MiB at the end"
    assert files_end <= files_200
    assert tasks_end <= tasks_200 + 2
    assert threads_end <= threads_200
    assert ledger["ledger/trained"] == STEPS * 2
    assert ledger["ledger/in_flight"] == 0
    assert ledger["ledger/dropped"] > 100
    episodes = 2 * (ledger["ledger/trained"] + ledger["ledger/filtered"] + 2 * ledger["ledger/dropped"])
    saw(f"memory {begin / 2**20:.1f} MiB at step 200, {end / 2**20:.1f} MiB at the end ({growth:+.1%})")
    pairs = {"open files": files, "tasks": tasks, "threads": threads}
    saw(", ".join(f"{name} {at_200:.0f} and {at_end:.0f}" for name, (at_200, at_end) in pairs.items()))
    saw(f"{episodes:.0f} episodes in {report['seconds']:.0f} s")
