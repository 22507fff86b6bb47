"""Raylets on loopback addresses of this machine, each a node of one Ray cluster: ``python -m tests.faults.raylets CPUS``.

Each line on standard input is a command, ``add CPUS GPUS`` (the GPUs are resources by name only) or ``kill NUMBER`` (of the nodes
beside the head, in the order of their addition); each is answered by a line.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]


class Raylets:
    """The cluster, from the test's side."""

    def __init__(self, process: subprocess.Popen[str], folder: str) -> None:
        self._process, self._folder = process, folder
        self.address = self._answer()

    def add(self, cpus: int, gpus: int = 0) -> None:
        """Start one more raylet, whose GPUs are resources by name only."""
        self._command(f"add {cpus} {gpus}")

    def kill(self, number: int = -1) -> None:
        """Kill one of the raylets that were added, the last by default, and with it its workers."""
        self._command(f"kill {number}")

    def actors(self, address: str) -> list[str]:
        """Classes of the actors on the raylet at `address`."""
        found = []
        for process in psutil.process_iter():
            try:
                title, parent = " ".join(process.cmdline()), process.parent()
                above = parent.cmdline() if parent else []
            except psutil.Error:
                continue
            if (
                title.startswith(("ray::RolloutActor", "ray::LearnerActor"))
                and f"--node_ip_address={address}" in above
                and any(self._folder in word for word in above)
            ):
                found.append(title.removeprefix("ray::").partition(".")[0].split()[0])
        return sorted(found)

    def _command(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("raylets: "):
                return line.split()[1]
        raise AssertionError(f"the cluster ended with code {self._process.wait()}")


@contextlib.contextmanager
def raylets(*cpus: int, **env: str) -> Iterator[Raylets]:
    """A cluster of a raylet for each number of CPUs, the head first; at the end nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="raylets-", ignore_cleanup_errors=True) as folder:  # short: sockets' paths are limited
        os.mkdir(f"{folder}/ray")
        settings = {"RAY_TMPDIR": folder, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", **env}
        words = [sys.executable, "-m", "tests.faults.raylets", str(cpus[0])]
        variables, pipe = {**os.environ, **settings}, subprocess.PIPE
        with subprocess.Popen(words, cwd=ROOT, env=variables, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
            try:
                cluster = Raylets(process, folder)
                for more in cpus[1:]:
                    cluster.add(more)
                yield cluster
            finally:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(60)


def main(head_cpus: str) -> None:
    """Serve commands until the end of standard input."""
    from ray.cluster_utils import Cluster

    common = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": int(head_cpus), "node_ip_address": "127.0.0.1", **common})
    added: list[Any] = []
    sys.stdout.write(f"raylets: {cluster.address}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        command, _, value = line.partition(" ")
        if command == "add":
            cpus, gpus = map(int, value.split())
            added.append(cluster.add_node(num_cpus=cpus, num_gpus=gpus, node_ip_address=f"127.0.0.{2 + len(added)}", **common))
        else:
            cluster.remove_node(added[int(value)], allow_graceful=False)
        sys.stdout.write("raylets: done\n")
        sys.stdout.flush()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
