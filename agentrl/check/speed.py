"""Times of calls, the resulting limit of throughput, and calls that hold the event loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agentrl.check.context import Context
from agentrl.check.probe import UserCall

HOLD_S = 0.05
HOLDS, HOLD_SHARE = 3, 0.2
LONG_S, LONG_RATIO = 0.5, 20.0
METHODS = ("__init__", "reset", "step", "close")


def check_speed(context: Context) -> None:
    """Fill in the table of times, and compare it with the concurrency that was asked for."""
    calls = [call for call in context.watch.calls if call.done and call.error is None and call.tag]
    for method in METHODS:
        own = [call for call in calls if call.method == method]
        if own:
            context.report.timing.append(_row(method, own))
    blocked = _blocked(context, calls)
    slow_text = not blocked and _slow_text(context, calls)
    _bounds(context, calls, blocked or slow_text)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of them does not exceed; they need not be sorted."""
    ordered = sorted(values)
    return ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1] if ordered else 0.0


def _row(method: str, calls: Sequence[UserCall]) -> dict[str, Any]:
    seconds = [call.seconds for call in calls[1:] or calls]  # the first may import and connect
    return {
        "method": method,
        "runs": "event loop" if calls[0].is_async else "thread",
        "calls": len(calls),
        "p50_s": percentile(seconds, 0.5),
        "p99_s": percentile(seconds, 0.99),
        "first_s": calls[0].seconds,
    }


def _blocked(context: Context, calls: Sequence[UserCall]) -> bool:
    """Once may be the machine's fault, or an import; so it takes several times."""
    for method in ("reset", "step", "close"):
        held = [call for call in calls if call.method == method and call.is_async and call.tag != "long"]
        over = [call for call in held if call.longest_s > HOLD_S]
        if len(over) >= HOLDS and len(over) >= HOLD_SHARE * len(held):
            typical, computed = (percentile([getattr(call, name) for call in over], 0.5) for name in ("longest_s", "computed_s"))
            times = f"typically {typical:.2f} s, {computed:.2f} s of which it computed"
            seen = f"{len(over)} of {len(held)} calls held it for more than {HOLD_S:g} s, {times}"
            context.found("blocks-loop", method, seen)
            return True
    return False


def _slow_text(context: Context, calls: Sequence[UserCall]) -> bool:
    steps = [call for call in calls if call.method == "step"]
    usual = percentile([call.seconds for call in steps if call.tag != "long"], 0.5)
    long = percentile([call.seconds for call in steps if call.tag == "long"], 0.25)
    if long > LONG_S and long > LONG_RATIO * usual:
        context.found("slow-on-long-text", "step", f"{long:.2f} s for an answer of 10,000 characters, {usual:.4f} s for others")
        return True
    return False


def _bounds(context: Context, calls: Sequence[UserCall], known: bool) -> None:
    """Report the throughput of one worker: threads work in parallel, the event loop does one thing at a time."""
    settings, good = context.settings, context.good()
    steps = [call.seconds for call in calls if call.method == "step"]
    if not steps or not good:
        return
    turns = sum(len(played.turns) for played in good) / len(good)
    on_threads = on_loop = 0.0
    for method in METHODS:
        own = [call for call in calls if call.method == method]
        times = turns if method == "step" else 1.0
        if own and own[0].is_async:
            on_loop += times * _usual([call.longest_s for call in own])
        else:
            on_threads += times * _usual([call.seconds for call in own])
    typical = percentile(steps, 0.5)
    is_async = any(call.is_async for call in calls if call.method == "step")
    threads_needed = 0 if is_async else math.ceil(settings.check.concurrency * typical / (typical + settings.check.turn_s))
    context.report.speed = {
        "concurrency": settings.check.concurrency,
        "env_threads": settings.rollout.env_threads,
        "turn_s": settings.check.turn_s,
        "threads_needed": threads_needed,
        "episodes_per_s": 1 / max(on_threads / settings.rollout.env_threads, on_loop, 1e-9),
    }
    if threads_needed > settings.rollout.env_threads and not known:
        busy = f"keep {threads_needed} threads busy, and there are {settings.rollout.env_threads}"
        load = f"{settings.check.concurrency} episodes at once with turns of {settings.check.turn_s:g} s"
        context.found("slow-calls", "step", f"step takes {typical:.2f} s; {load} {busy}")


def _usual(seconds: Sequence[float]) -> float:
    """Mean of the calls after the first, which may import and connect."""
    later = seconds[1:] or seconds
    return sum(later) / len(later) if later else 0.0
