"""Start rate and memory of sandboxes: ``python -m tests.benchmarks.sandboxes [NUMBER [IMAGE]]``, 50 by default, all at once.

With the name of an image, containers are measured too.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from statistics import median

from agentrl.env.isolation.system import MIB, processes
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import Kind, SandboxSpec

HOLD_S: dict[Kind, float] = {"local": 12.0, "none": 8.0, "container": 45.0}
"""Seconds for which programs sleep: all of them have begun two seconds before the end."""
OURS = (b"system.py", b"bwrap", b"sleep", b"conmon", b"podman", b"docker", b"containerd-shim", b"reaper.py")
"""Words in the command lines of processes that hold a sandbox."""


async def one(kind: Kind, image: str, line: str) -> float:
    """Run a line of the shell in a sandbox of its own, and return the seconds that it took with start and end."""
    begin = time.perf_counter()
    async with Sandbox(SandboxSpec(kind=kind, image=image)) as sandbox:
        (await sandbox.exec("sh", "-c", line)).check()
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


def held(before: set[int]) -> list[int]:
    """Return the processes that came since: those of containers are children of nobody here."""
    table = processes()
    return [pid for pid in table if pid not in before and table[pid].state not in "ZX" and _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(word in words for word in OURS)


async def measure(kind: Kind, number: int, image: str = "") -> str:
    """Return a row of the table."""
    await one(kind, image, "true")
    begin, cpu = time.perf_counter(), time.process_time()
    seconds = await asyncio.gather(*(one(kind, image, "true") for _ in range(number)))
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    before, hold_s = set(processes()), HOLD_S[kind]
    holding = [asyncio.create_task(one(kind, image, f"sleep {hold_s}")) for _ in range(number)]
    await asyncio.sleep(hold_s - 2.0)
    own = held(before)
    memory = proportional(own) / number
    await asyncio.gather(*holding)
    figures = f"{number / wall:.0f} | {median(seconds):.2f} | {1000 * cpu / number:.1f} | {memory:.1f} | {len(own) / number:.1f}"
    return f"| `{kind}` | {figures} |"


async def main(number: int, image: str = "") -> None:
    """Print the table."""
    rows = [await measure("local", number), await measure("none", number)] + ([await measure("container", number, image)] if image else [])
    head = "| sandbox | starts per second | start to end, s (p50) | trainer's CPU per start, ms | memory, MiB (PSS) | processes |"
    sys.stdout.write("\n".join([head, "|---|---|---|---|---|---|", *rows, ""]))


if __name__ == "__main__":
    asyncio.run(main(int((sys.argv[1:] or ["50"])[0]), *sys.argv[2:3]))
