"""Who could connect to a run: nothing of ours listens beyond loopback, and Ray's own listeners want a token."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ENVS, ROOT, SMALL
from tests.e2e.test_endings import family, wait_for_a_step
from tests.faults.report import Saw
from tests.faults.support import disturbed
from tests.faults.test_secrets import command_line

INTRUDER = """
import sys, ray
try:
    ray.init(address=sys.argv[1], logging_level="ERROR", _node_ip_address="127.0.0.1")
    print("in:", ray.cluster_resources())
except BaseException as error:
    print("refused:", type(error).__name__, str(error).splitlines()[0][:200])
"""
GRPC = """
import sys, ray
from ray._raylet import GcsClient
try:
    client = GcsClient(address=sys.argv[1])
    print("in:", client.internal_kv_keys(b"", None, timeout=5))
except BaseException as error:
    print("refused:", type(error).__name__, str(error).splitlines()[0][:200])
"""


def listeners(process: psutil.Process) -> list[tuple[str, int]]:
    try:
        found = process.net_connections(kind="inet")
    except psutil.Error:
        return []
    return [(connection.laddr.ip, connection.laddr.port) for connection in found if connection.status == psutil.CONN_LISTEN]


def beyond_loopback(address: str) -> bool:
    return not ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback


def kind(process: psutil.Process) -> str:
    words = command_line(process)
    for word in ("RolloutActor", "LearnerActor", "gcs_server", "raylet", "dashboard", "runtime_env", "log_monitor", "monitor.py", "ray::"):
        if word in words:
            return word
    return words[:60] or "?"


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.row(27, "(nothing: every listening socket of a running run on Ray, and connections without the token)")
def test_nothing_of_ours_listens_beyond_loopback_and_ray_wants_a_token(tmp_path: Path, saw: Saw) -> None:
    words = ("--agent", str(ENVS / "calculator.py"), "--run-dir", str(tmp_path / "run"), "--num-steps", "10000", "--async", *SMALL)
    with disturbed(*words) as process:
        wait_for_a_step(process, tmp_path / "run")
        members = [psutil.Process(process.pid), *family(process.pid)]
        sockets = {(kind(member), ip, port) for member in members for ip, port in listeners(member)}
        assert sockets
        dashboards = [line for member in members if "dashboard/dashboard.py" in (line := command_line(member))]
        (gcs,) = {port for name, _, port in sockets if name == "gcs_server"} & gcs_ports(members) or {0}
        address = f"127.0.0.1:{gcs}"
        answers = [intrude(script, address) for script in (INTRUDER, GRPC)]
        assert process.poll() is None
    assert all("--disable-frontend" in line and "--minimal" in line for line in dashboards), dashboards  # sends usage statistics, if any
    assert 8265 not in {port for _, _, port in sockets}
    open_ones = sorted({name for name, ip, _ in sockets if beyond_loopback(ip)})
    assert all(answer.startswith("refused:") for answer in answers), answers
    assert not open_ones, sorted(sockets)
    saw(f"{len(sockets)} listening sockets, no page of a dashboard; beyond loopback: {', '.join(open_ones) or 'none'}")
    saw("without the token: " + "; ".join(answer.removeprefix("refused: ") for answer in answers))


def gcs_ports(members: list[psutil.Process]) -> set[int]:
    """The port of Ray's control service, as its command line says."""
    words = [word for member in members for word in command_line(member).split()]
    return {int(word.rpartition("=")[2]) for word in words if word.startswith("--gcs_server_port=") and word[-1].isdigit()} | {
        int(word.rpartition(":")[2]) for word in words if word.startswith(("--gcs-address=", "--gcs_address="))
    }


def intrude(script: str, address: str) -> str:
    """What a process without the token is told."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, address], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60, env=clean
        )
    except subprocess.TimeoutExpired:
        return "refused: no answer within 60 s"
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"refused: exit code {done.returncode}"
