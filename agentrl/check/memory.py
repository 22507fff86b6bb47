"""Memory that every episode adds to, of Python's objects or of native code."""

from __future__ import annotations

import gc
import sysconfig
import time
import tracemalloc
from pathlib import Path

import psutil

from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.check.play import CheckedEpisode, repeating
from agentrl.core.operating_system import held_alone_bytes, on_linux
from agentrl.env.isolation import launcher

KIB = 2**10
LEAKS = ("leaks-files", "leaks-sockets", "leaks-threads", "leaks-tasks", "leaks-processes", "ignores-cancellation", "timeout")
ROUNDS, SETTLING = 8, 2
"""Rounds of episodes; the first ones fill caches and are not judged."""
EPISODES = 10
LEAK_BYTES = 4 * KIB
"""Bytes that an episode adds in each round, if they count as a leak."""
ROUND_S = 1.0
TIMED = 3
"""Episodes that are timed first; the fastest says whether there is time for all, since the first ones fill caches."""
FRAMES = 12
_ELSEWHERE = (str(Path(__file__).parents[1]), f"{sysconfig.get_path('stdlib')}/", "<")


async def check_memory(context: Context) -> None:
    """Play the longest episode again and again, and report memory that grows each time."""
    longest = max(context.good(), key=lambda played: len(played.turns), default=None)
    if longest is None or not on_linux() or context.report.has(*LEAKS):  # what leaks holds memory, too
        return
    took = min([await _duration(context, longest) for _ in range(TIMED)])
    if took * EPISODES > ROUND_S or took * EPISODES * ROUNDS > context.left(0.5):
        context.report.skipped.append(f"memory: {NO_TIME}" if took * EPISODES <= ROUND_S else f"memory: an episode takes {took:.2f} s")
        return
    gc.collect()
    gc.freeze()  # so that only objects of these episodes are looked through
    sizes: list[int] = []
    for number in range(ROUNDS):
        await _play(context, longest, EPISODES)
        sizes.append(held_bytes())
        if number >= SETTLING and sizes[-1] - sizes[-2] < LEAK_BYTES * EPISODES:
            return
    grown = (sizes[-1] - sizes[SETTLING - 1]) / EPISODES / (ROUNDS - SETTLING)
    place = await _place(context, longest)
    context.found("leaks-memory", "close", f"{grown / KIB:.0f} KiB more with each of {EPISODES * (ROUNDS - SETTLING)} episodes{place}")


async def _duration(context: Context, longest: CheckedEpisode) -> float:
    """Return the seconds that one episode takes."""
    begin = time.monotonic()
    await _play(context, longest, 1)
    return time.monotonic() - begin


def held_bytes() -> int:
    """Return the memory that this process holds alone, once what is free has been given back to the system."""
    gc.collect()
    return held_alone_bytes()


def limit_memory(mib: int) -> int:
    """Limit the memory that this process takes from now on, and return the limit in MiB; 0: half of what is free."""
    limit = mib or int(psutil.virtual_memory().available / 2) // launcher.MIB
    if on_linux():
        launcher.limit_memory(limit)
    return limit


async def _play(context: Context, longest: CheckedEpisode, count: int) -> None:
    """Play episodes of which this process keeps nothing itself."""
    calls = len(context.watch.calls)
    for _ in range(count):
        await context.player.play(longest.task, repeating(longest.actions))
    del context.watch.calls[calls:]


async def _place(context: Context, longest: CheckedEpisode) -> str:
    """Return the line of user code from which most of the memory comes; empty if it is not known."""
    # Tracing slows every allocation, so it begins only once growth is certain.
    tracemalloc.start(FRAMES)
    try:
        before = tracemalloc.take_snapshot()
        await _play(context, longest, EPISODES)
        gc.collect()
        changes = tracemalloc.take_snapshot().compare_to(before, "traceback")
    finally:
        tracemalloc.stop()
    for change in sorted(changes, key=lambda change: -change.size_diff)[:FRAMES]:
        own = [frame for frame in change.traceback if not frame.filename.startswith(_ELSEWHERE) and "/site-packages/" not in frame.filename]
        if own:
            return f", most of it from {Path(own[-1].filename).name}, line {own[-1].lineno}"
    return ""
