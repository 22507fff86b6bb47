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
    assert len(rows) == report["steps"] == STEPS
    early, late = rows[200:300], rows[-110:-10]  # at the very end there is less to do
    begin, end = (statistics.median(row[0] for row in part) for part in (early, late))
    # Episodes and checkpoints under way have tasks and files of their own; what is never given back is there in the quietest step too.
    least = {name: [min(row[i] for row in part) for part in (early, late)] for i, name in enumerate(("files", "tasks", "threads"), 1)}
    assert begin > 50 * 2**20
    growth = end / begin - 1
    ledger = report["ledger"]
    assert growth < 0.05, f"{begin / 2**20:.1f} MiB at step 200, {end / 2**20:.1f} MiB at the end"
    assert all(0 < at_end <= at_200 for at_200, at_end in least.values()), least
    assert all(0 < count <= most for count, most in report["pools"].values()), report["pools"]
    assert ledger["ledger/trained"] == STEPS * 2
    assert ledger["ledger/in_flight"] == 0
    assert ledger["ledger/dropped"] > 100
    episodes = 2 * (ledger["ledger/trained"] + ledger["ledger/filtered"] + 2 * ledger["ledger/dropped"])
    saw(f"memory {begin / 2**20:.1f} MiB at step 200, {end / 2**20:.1f} MiB at the end ({growth:+.1%})")
    saw("at least " + ", ".join(f"{at_200} and {at_end} {name}" for name, (at_200, at_end) in least.items()))
    saw(", ".join(f"pool {name} {count} threads of {most}" for name, (count, most) in report["pools"].items()))
    saw(f"{episodes:.0f} episodes in {report['seconds']:.0f} s")
