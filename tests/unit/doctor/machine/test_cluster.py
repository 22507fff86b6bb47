"""Machines of a cluster: each is examined, their clocks and versions are compared, and they send to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.doctor.machine.cluster import clock, compared
from agentrl.doctor.machine.exchange import exchanged
from agentrl.doctor.machine.findings import Level
from tests.faults.raylets import ROOT, raylets

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
CONNECTED = """
import asyncio, sys
from agentrl.cluster.machines import machines_of
from agentrl.doctor.machine.cluster import connected

async def main():
    async with machines_of(sys.argv[1]) as machines:
        print(len(machines.hosts), await connected(machines, "cpu"))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_clock_counts_as_skewed_beyond_the_time_of_the_question() -> None:
    assert clock("b", [(10.0, 10.5, 11.0)]).found == "+0.0 s from this machine's"
    assert clock("b", [(10.0, 17.0, 19.0), (20.0, 27.0, 20.5)]).found == "+6.5 s from this machine's"  # the quickest answer counts
    behind = clock("b", [(100.0, 40.0, 100.1)])
    assert (behind.name, behind.level, behind.found) == ("clock of b", Level.WRONG, "-60.0 s from this machine's")
    assert "timedatectl" in behind.remedy


def test_equal_versions_are_one_good_finding() -> None:
    assert [finding.level for finding in compared({"a": {"ray": "1"}, "b": {"ray": "1"}})] == [Level.GOOD]
    assert [finding.name for finding in compared({"a": {"ray": "1"}, "b": {"ray": "2"}})] == ["ray"]


def test_digests_and_sums_of_members_are_compared() -> None:
    assert exchanged("gloo", ["digests 1.0 yes 5 6", "digests 2.0 yes 5 6"], 2**20).found == (
        "2 processes: 4 x 1 MiB equal by digest, sums right, 0.00 GB/s"
    )
    assert exchanged("gloo", ["digests 1.0 yes 5 6", "digests 2.0 yes 5 7"], 2**20).level is Level.WRONG
    assert exchanged("NCCL", ["digests 1.0 yes 5", "digests 2.0 no 5"], 2**20).level is Level.WRONG
    broken = exchanged("NCCL", ["digests 1.0 yes 5", "no answer within 40 s"], 2**20)
    assert (broken.level, broken.found) == (Level.WRONG, "rank 1: no answer within 40 s")
    assert "NCCL_DEBUG=INFO" in broken.remedy


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_of_a_cluster_are_examined_and_connected(tmp_path: Path) -> None:
    script = tmp_path / "connected.py"
    script.write_text(CONNECTED, encoding="utf-8")
    with raylets(1, 1) as cluster:
        environment = {**os.environ, **LOOPBACK, "AGENTRL_CACHE": str(tmp_path / "cache")}
        words = [sys.executable, "-m", "agentrl", "doctor", "--ray-address", cluster.address, "--device", "cpu", "--no-trials", "--json"]
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        report = json.loads(ran.stdout)
        joined = subprocess.run(
            [sys.executable, str(script), cluster.address], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
    assert [machine["host"].split()[0] for machine in report["machines"]] == ["127.0.0.1", "127.0.0.2"]
    assert all(len(machine["findings"]) > 10 for machine in report["machines"])
    between = {finding["name"]: finding["level"] for finding in report["between"]["findings"]}
    assert between == {"versions": "good", "clock of 127.0.0.1": "good", "clock of 127.0.0.2": "good", "folder of runs": "good"}
    assert joined.returncode == 0, joined.stderr
    assert joined.stdout.startswith("2 ")
    assert "2 processes: 4 x 4 MiB equal by digest, sums right" in joined.stdout
