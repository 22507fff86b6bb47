"""Start rate and memory of sandboxes: ``python -m tests.benchmarks.sandboxes [NUMBER]``, 50 by default, all at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from statistics import median

from agentrl.env.isolation.system import MIB, families, processes
from agentrl.env.sandbox.sandbox import Sandbox
from agentrl.env.sandbox.spec import Kind, SandboxSpec

HOLD_S = 6.0


async def one(kind: Kind, line: str) -> float:
    """Run a line of the shell in a sandbox of its own, and return the seconds that it took with start and end."""
    begin = time.perf_counter()
    async with Sandbox(SandboxSpec(kind=kind)) as sandbox:
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


async def measure(kind: Kind, number: int) -> str:
    """Return a row of the table."""
    await one(kind, "true")
    begin, cpu = time.perf_counter(), time.process_time()
    seconds = await asyncio.gather(*(one(kind, "true") for _ in range(number)))
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    holding = [asyncio.create_task(one(kind, f"sleep {HOLD_S}")) for _ in range(number)]
    await asyncio.sleep(HOLD_S / 2)
    table = processes()
    own = [pid for pid in families(table, [os.getpid()])[os.getpid()] if pid != os.getpid()]
    memory = proportional(own) / number
    await asyncio.gather(*holding)
    figures = f"{number / wall:.0f} | {median(seconds):.2f} | {1000 * cpu / number:.1f} | {memory:.1f} | {len(own) / number:.1f}"
    return f"| `{kind}` | {figures} |"


async def main(number: int) -> None:
    """Print the table."""
    rows = [await measure(kind, number) for kind in ("local", "none")]
    head = "| sandbox | starts per second | start to end, s (p50) | trainer's CPU per start, ms | memory, MiB (PSS) | processes |"
    sys.stdout.write("\n".join([head, "|---|---|---|---|---|---|", *rows, ""]))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
