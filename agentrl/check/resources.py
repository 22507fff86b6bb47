"""Checks that `close` releases the resources of an episode, and that a cancelled episode ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
import time

import psutil

from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.check.play import TextEpisode, repeating
from agentrl.core.operating_system import descriptors_folder, on_linux
from agentrl.core.types import Task
from agentrl.env.isolation.leftovers import command_lines, family, listed

ROUNDS = 3
SETTLE_S = 0.3
LOOKS = 5


async def check_resources(context: Context) -> None:
    """Play some episodes in full, leave some, cancel some, and count what is open before and after."""
    longest = max(context.good(), key=lambda played: len(played.turns), default=None)
    if longest is None:
        return
    before = await _settled(None)
    for round_number in range(ROUNDS):
        if context.left(0.4) <= 0:
            context.report.skipped.append(f"resources: {NO_TIME}")
            return
        await context.player.play(longest.task, repeating(longest.actions))
        await context.player.play(longest.task, repeating([]))
        await _cancel(context, longest.task, longest.actions[0], round_number)
    _report(context, before, await _settled(before))


def _report(context: Context, before: dict[str, int], after: dict[str, int]) -> None:
    # A leak adds one in each round at least; less is something that is opened once and kept.
    grown = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind] >= ROUNDS}
    if "processes" in grown:  # each comes with pipes
        grown = {"processes": grown["processes"]}
    if context.report.has("ignores-cancellation", "timeout"):  # what was left behind still holds what it holds
        return
    for kind, count in grown.items():
        named = left_processes(context) if kind == "processes" else ""
        context.found(f"leaks-{kind}", "close", f"{count} {kind} more after {2 * ROUNDS} to {3 * ROUNDS} episodes{named}")


def left_processes(context: Context) -> str:
    """Return the programs of processes that still run, and the line that started the last one, to be put behind their number."""
    line = "" if context.watch.effects is None else context.watch.effects.witness.line("processes")
    return f": {listed(command_lines(running_processes()).values())}{line}"


def running_processes() -> list[int]:
    """Return the processes that descend from this one, those left out that have ended and are not collected.

    A look at the system takes a while. A process whose parent ends meanwhile is missed by it, so two looks must agree.
    """
    found = family(os.getpid())
    for _ in range(LOOKS):
        before, found = found, family(os.getpid())
        if found == before:
            break
    return sorted(found)


async def settled_processes(base: int) -> int:
    """Return how many processes still run, once those beyond `base` that are about to end have ended."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        count = len(running_processes())
        if count <= base or time.monotonic() > deadline:
            return count
        await asyncio.sleep(0.01)


async def _cancel(context: Context, task: Task, action: str, number: int) -> None:
    """Cancel `step` where it first waits for something; the first round cancels `reset` as well."""
    for method in ("step", "reset") if number == 0 else ("step",):
        if not inspect.iscoroutinefunction(getattr(context.cls, method, None)):
            continue
        episode = TextEpisode(context.player, task, repeating([action]))
        try:
            running = asyncio.create_task(episode.run())
            await _until_waiting(context, method)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            call = next((call for call in reversed(context.watch.calls) if call.method == method), None)
            if call is not None and not call.done:  # the boundary has waited for a second
                context.found("ignores-cancellation", method, f"{method} was cancelled, and still ran a second later")
        finally:
            await episode.close()


async def _until_waiting(context: Context, method: str) -> None:
    """Until the newest call of a method has begun and waits for something, or is done."""
    count = len(context.watch.calls)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        # Control comes back here only when the call suspends, so one that has begun is waiting or done.
        await asyncio.sleep(0)
        if any(call.method == method for call in context.watch.calls[count:]):
            return


async def _settled(base: dict[str, int] | None) -> dict[str, int]:
    """Return the open resources, once ending threads and tasks have ended."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        # Objects in reference cycles hold their files and sockets until they are collected.
        gc.collect()
        await asyncio.sleep(0.01)
        counts = _counts()
        if base is None or time.monotonic() > deadline or all(counts[kind] <= base[kind] for kind in counts):
            return counts


def _counts() -> dict[str, int]:
    files, sockets = _descriptors()
    own = [thread for thread in threading.enumerate() if thread.name != "agentrl-env"]
    return {
        "files": files,
        "sockets": sockets,
        "threads": len(own),
        "tasks": len(asyncio.all_tasks()),
        "processes": len(running_processes()),
    }


def _descriptors() -> tuple[int, int]:
    """Open files and open sockets; where the system does not tell them apart, all of them count as files."""
    if not on_linux():
        return psutil.Process().num_fds(), 0
    targets: list[str] = []
    for link in descriptors_folder().iterdir():
        # One link is the descriptor of this listing itself, which is closed by now.
        with contextlib.suppress(OSError):
            targets.append(os.readlink(link))
    sockets = sum(target.startswith("socket:") for target in targets)
    return len(targets) - sockets, sockets
