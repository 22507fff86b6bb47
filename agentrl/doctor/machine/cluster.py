"""The machines of a Ray cluster: each by itself, and then against each other."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.cluster.machines import Machines, machines_of
from agentrl.core.process import free_port
from agentrl.doctor.machine.examine import BUDGET_S, Device, examine
from agentrl.doctor.machine.findings import Finding, MachineReport, judged
from agentrl.doctor.machine.limits import SKEW_S
from agentrl.doctor.machine.packages import differing, installed

PART = "machines"
ANSWER_S = 60.0
"""Time for what takes a moment on a machine, since a process has to start there."""
ASKED = 5
"""Times that a machine is asked for its time; the quickest answer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """Findings on each machine, and on their being together."""

    machines: tuple[MachineReport, ...]
    between: MachineReport

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, else 0."""
        return max(report.exit_code for report in (*self.machines, self.between))

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types."""
        return {"machines": [report.to_dict() for report in self.machines], "between": self.between.to_dict()}


async def examine_cluster(address: str, device: Device = "auto", *, trials: bool = True) -> ClusterReport:
    """Examine every machine of a cluster, all at once, and then compare and connect them."""
    begin = time.monotonic()
    async with machines_of(address) as machines:
        calls = (machines.call(host, _examined, device, trials, host, timeout_s=BUDGET_S + ANSWER_S) for host in machines.hosts)
        examined = await asyncio.gather(*calls)
        reports, versions = (
            [report for report, _ in examined],
            {host: each for host, (_, each) in zip(machines.hosts, examined, strict=True)},
        )
        found = [*compared(versions), *await clocks(machines), await folder(machines, Path.cwd())]
        if trials:
            found.append(await connected(machines, device))
    name = f"{len(reports)} machines"
    return ClusterReport(
        machines=tuple(reports), between=MachineReport(host=address, device=name, findings=tuple(found), seconds=time.monotonic() - begin)
    )


def _examined(device: Device, trials: bool, host: str) -> tuple[MachineReport, dict[str, str]]:
    """Examine the machine that this is called on."""
    report = examine(device, trials=trials)
    return replace(report, host=f"{host} ({socket.gethostname()})"), installed()


def compared(versions: Mapping[str, Mapping[str, str]]) -> Sequence[Finding]:
    """Return findings on packages that are not the same everywhere, or one that all are."""
    return list(differing(versions)) or [Finding(part=PART, name="versions", found="the same on all machines")]


async def clocks(machines: Machines) -> Sequence[Finding]:
    """Compare the clock of every machine with that of this one."""
    return [clock(host, [await _asked(machines, host) for _ in range(ASKED)]) for host in machines.hosts]


async def _asked(machines: Machines, host: str) -> tuple[float, float, float]:
    before = time.time()
    there = await machines.call(host, time.time, timeout_s=ANSWER_S)
    return before, there, time.time()


def clock(host: str, asked: Sequence[tuple[float, float, float]]) -> Finding:
    """Return the verdict on a clock from times before a question, there, and at the answer."""
    before, there, after = min(asked, key=lambda times: times[2] - times[0])
    # A clock is wrong only by what the time of the answer cannot explain.
    ahead = max(there - after, min(there - before, 0.0)) if not before <= there <= after else 0.0
    remedy = "Set its clock, or start its service: timedatectl set-ntp true, or chronyd."
    return judged(PART, f"clock of {host}", f"{ahead:+.1f} s from this machine's", wrong=abs(ahead) > SKEW_S, remedy=remedy)


async def folder(machines: Machines, place: Path) -> Finding:
    """See whether every machine has the same working folder, where runs are written unless they are told another place."""
    with tempfile.NamedTemporaryFile(prefix=".agentrl-doctor-", dir=place) as probe:
        there = await asyncio.gather(*(machines.call(host, os.path.exists, probe.name, timeout_s=ANSWER_S) for host in machines.hosts))
    lacking = [host for host, exists in zip(machines.hosts, there, strict=True) if not exists]
    found = f"{place} is not the same on {', '.join(lacking)}" if lacking else f"{place} is the same on all machines"
    remedy = "Give --run-dir a folder that all machines share: the learner's ranks write checkpoints there."
    return judged(PART, "folder of runs", found, warning=bool(lacking), remedy=remedy)


async def connected(machines: Machines, device: Device) -> Finding:
    """Have the first machine send to all others, and all of them sum, over gloo or NCCL."""
    hosts = machines.hosts
    kinds = await asyncio.gather(*(machines.call(host, _kind, device, timeout_s=ANSWER_S) for host in hosts))
    kind = "cuda" if all(each == "cuda" for each in kinds) else "cpu"
    port = await machines.call(hosts[0], free_port, hosts[0], timeout_s=ANSWER_S)
    # Imports torch, which the facts alone do not need.
    from agentrl.doctor.machine.exchange import DEADLINE_S, SIZE, exchanged

    calls = (
        machines.call(host, _member, rank, len(hosts), kind, host, f"tcp://{hosts[0]}:{port}", timeout_s=DEADLINE_S + ANSWER_S)
        for rank, host in enumerate(hosts)
    )
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return exchanged("NCCL" if kind == "cuda" else "gloo", [str(answer) for answer in answers], SIZE[kind])


def _kind(device: Device) -> str:
    from agentrl.cluster.build import device as kind_of_device

    return kind_of_device(device)


def _member(rank: int, count: int, kind: str, host: str, meeting: str) -> str:
    """Take part in a group of machines, over the network that the raylet's address is in."""
    from agentrl.cluster.ray_actors import interface_of

    if interface := interface_of(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    import torch

    from agentrl.doctor.machine.exchange import take_part

    return take_part(rank, count, torch.device(kind, 0) if kind == "cuda" else torch.device(kind), meeting)
