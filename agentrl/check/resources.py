"""Checks that `close` releases the resources of an episode, and that a cancelled episode ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from agentrl.check.context import Context
from agentrl.check.findings import Rule, Severity
from agentrl.check.play import repeating
from agentrl.core.types import Task

ROUNDS = 3
SETTLE_S = 0.3
CANCEL_GRACE_S = 1.2
DESCRIPTORS = Path("/proc/self/fd")

_GROWS = "Every episode adds to it, until the process may open no more, or has no memory left."

RULES = (
    Rule(
        id="leaks-files",
        severity=Severity.ERROR,
        title="files stay open after close",
        why=_GROWS,
        remedy="Close in close() what reset and step opened, also after a failure.",
        snippet="def close(self):\n    if self.file is not None:\n        self.file.close()",
    ),
    Rule(
        id="leaks-sockets",
        severity=Severity.ERROR,
        title="connections stay open after close",
        why=_GROWS,
        remedy="Close in close() what reset and step connected, also after a failure.",
        snippet="async def close(self):\n    await self.client.aclose()",
    ),
    Rule(
        id="leaks-threads",
        severity=Severity.ERROR,
        title="threads go on after close",
        why=_GROWS,
        remedy="Tell the thread to end, and join it, in close().",
        snippet="def close(self):\n    self.stopped.set()\n    self.thread.join(timeout=5)",
    ),
    Rule(
        id="leaks-tasks",
        severity=Severity.ERROR,
        title="asyncio tasks go on after close",
        why=_GROWS,
        remedy="Cancel the task in close().",
        snippet="async def close(self):\n    self.task.cancel()",
    ),
    Rule(
        id="leaks-processes",
        severity=Severity.ERROR,
        title="child processes go on after close",
        why=_GROWS,
        remedy="End the process, and wait for it, in close().",
        snippet="def close(self):\n    self.process.kill()\n    self.process.wait(timeout=5)",
    ),
    Rule(
        id="ignores-cancellation",
        severity=Severity.ERROR,
        title="a call goes on although it was cancelled",
        why="Deadlines and the end of a run cancel calls; this one is left behind, and works on an episode that is closed.",
        remedy="Let asyncio.CancelledError pass: catch Exception, not BaseException, and add no bare except around an await.",
        snippet="try:\n    await work()\nexcept Exception:  # not BaseException, which includes cancellation\n    ...",
    ),
)


async def check_resources(context: Context) -> None:
    """Play some episodes in full, leave some, cancel some, and count what is open before and after."""
    good = context.good()
    if not good:
        return
    longest = max(good, key=lambda played: len(played.turns))
    before = await _settled(None)
    for round_number in range(ROUNDS):
        if context.left(0.4) <= 0:
            context.report.skipped.append("resources: no time left")
            return
        await context.player.play(longest.task, repeating(longest.actions))
        await context.player.play(longest.task, repeating([]))
        await _cancel(context, longest.task, longest.actions[0], round_number)
    after = await _settled(before)
    _report(context, before, after)


def _report(context: Context, before: dict[str, int], after: dict[str, int]) -> None:
    grown = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind] >= ROUNDS}
    if "processes" in grown:  # each comes with pipes
        grown = {"processes": grown["processes"]}
    if context.report.has("ignores-cancellation", "timeout"):  # what was left behind still holds what it holds
        return
    for kind, count in grown.items():
        context.found(f"leaks-{kind}", "close", f"{count} {kind} more after {2 * ROUNDS} to {3 * ROUNDS} episodes")


async def _cancel(context: Context, task: Task, action: str, number: int) -> None:
    """Cancel `step` where it first waits for something; the first round cancels `reset` as well."""
    for method in ("step", "reset") if number == 0 else ("step",):
        if not inspect.iscoroutinefunction(getattr(context.cls, method, None)):
            continue
        episode = context.player.open(task, repeating([action]))
        try:
            running = asyncio.create_task(episode.run())
            await _until_waiting(context, method)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            _check_ended(context, method)
        finally:
            await episode.close()


async def _until_waiting(context: Context, method: str) -> None:
    """Until the newest call of a method has begun and waits for something, or is done."""
    count = len(context.watch.calls)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        await asyncio.sleep(0)
        if any(call.method == method for call in context.watch.calls[count:]):
            return


def _check_ended(context: Context, method: str) -> None:
    call = next((call for call in reversed(context.watch.calls) if call.method == method), None)
    if call is not None and not call.done:  # the boundary has waited for a second
        context.found("ignores-cancellation", method, f"{method} was cancelled, and still ran a second later")


async def _settled(base: dict[str, int] | None) -> dict[str, int]:
    """Return the open resources, once ending threads and tasks have ended."""
    deadline = time.monotonic() + SETTLE_S
    while True:
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
        "processes": len(psutil.Process().children(recursive=True)),
    }


def _descriptors() -> tuple[int, int]:
    """Open files and open sockets; where the system does not tell them apart, all of them count as files."""
    if not DESCRIPTORS.is_dir():
        return psutil.Process().num_fds(), 0
    targets = list(_targets())
    sockets = sum(target.startswith("socket:") for target in targets)
    return len(targets) - sockets, sockets


def _targets() -> Iterator[str]:
    for name in os.listdir(DESCRIPTORS):
        with contextlib.suppress(OSError):
            yield os.readlink(DESCRIPTORS / name)
