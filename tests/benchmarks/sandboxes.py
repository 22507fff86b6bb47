"""Start rate and memory of sandboxes: ``python -m tests.benchmarks.sandboxes [NUMBER [IMAGE]]``, 50 by default, all at once.

With the name of an image, containers are measured too.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from pathlib import Path
from statistics import median

from agentrl.env.isolation.launcher import MIB
from agentrl.env.isolation.system import families, processes
from agentrl.env.sandbox import reaper
from agentrl.env.sandbox.engine import find_engine, owner_label
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import Kind, SandboxSpec

KINDS: tuple[Kind, ...] = ("local", "none", "container")
SLEEP = "sleep 3600"
ALL_S = 300.0
"""Seconds in which all sandboxes have begun."""


async def one(kind: Kind, image: str, line: str) -> float:
    """Run a line of the shell in a sandbox of its own, and return the seconds that it took with start and end."""
    begin = time.perf_counter()
    async with Sandbox(SandboxSpec(kind=kind, image=image)) as sandbox:
        (await sandbox.exec("sh", "-c", line, timeout_s=math.inf)).check()
    return time.perf_counter() - begin


def proportional(pids: list[int]) -> float:
    """Return the memory of processes, shared pages counted in proportion, MiB."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except OSError:
            continue
    return total * 1024 / MIB


def holders() -> list[int]:
    """Return the processes of this one's sandboxes; those of containers descend from podman's monitors."""
    table = processes()
    ids = reaper.call(find_engine().program, "ps", "--quiet", "--no-trunc", "--filter", f"label={reaper.OWNER}={owner_label()}").split()
    monitors = [pid for pid in table if any(name.encode() in words_of(pid) for name in ids)] if ids else []
    members = families(table, [os.getpid(), *monitors])
    return sorted({pid for family in members.values() for pid in family} - {os.getpid()})


def words_of(pid: int) -> bytes:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def hold(kind: Kind, image: str, number: int) -> tuple[float, int]:
    """Have so many sandboxes run at once, and return their memory, MiB, and the number of their processes."""
    holding = [asyncio.create_task(one(kind, image, SLEEP)) for _ in range(number)]
    async with asyncio.timeout(ALL_S):
        while sum(words_of(pid) == SLEEP.replace(" ", "\0").encode() + b"\0" for pid in holders()) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    own = holders()
    memory = proportional(own)
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    return memory, len(own)


async def measure(kind: Kind, number: int, image: str = "") -> str:
    """Return a row of the table."""
    await one(kind, image, "true")
    begin, cpu = time.perf_counter(), time.process_time()
    seconds = await asyncio.gather(*(one(kind, image, "true") for _ in range(number)))
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    memory, held = await hold(kind, image, number)
    figures = f"{number / wall:.1f} | {median(seconds):.2f} | {1000 * cpu / number:.1f} | {memory / number:.1f} | {held / number:.1f}"
    return f"| `{kind}` | {figures} |"


async def main(number: int, image: str = "") -> None:
    """Print the table."""
    head = "| sandbox | starts per second | start to end, s (p50) | trainer's CPU per start, ms | memory, MiB (PSS) | processes |"
    sys.stdout.write(f"{head}\n|---|---|---|---|---|---|\n")
    for kind in KINDS if image else KINDS[:-1]:
        sys.stdout.write(await measure(kind, number, image) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(int((sys.argv[1:] or ["50"])[0]), *sys.argv[2:3]))
