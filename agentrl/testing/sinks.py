"""The contract of metric sinks."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.core.callbacks import Callback, MetricsRow, RunBegin, RunEnd
from agentrl.testing.running import finish, require

MAX_CALL_S = 5.0
"""Seconds that a run is let wait for one call."""
ROWS: tuple[Mapping[str, float], ...] = (
    {"eval/score": 0.25},
    {"reward/mean": 0.5, "loss": -1e-9, "tokens_per_s": 1e9},
    {"reward/mean": 0.75, "loss": 0.0, "my/own metric": 3.0},
)
"""Metrics of the steps 0 (an evaluation before the first step), 1 and 2 of the runs that a sink is told of."""


def check_sink(make: Callable[[], Callback], read: Callable[[], Sequence[Mapping[str, float]]] | None = None) -> None:
    """Tell a metric sink of a run with two steps, of its continuation, and of one that fails before its first step.

    Args:
        make: The class of the sink, or what makes one; called once for each run.
        read: Returns the rows that the sink of the first run has written, in order, to be compared with those that it was given; called
            when that run has ended. A row may have more than it was given.

    Raises:
        AssertionError: If a call raises, returns something, changes what it is given, takes more than 5 s, or a row is not as it was.
    """

    async def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _tell(make, Path(folder), range(len(ROWS)))
            if read is not None:
                _compare(read())
            _tell(make, Path(folder), range(2, len(ROWS)), resumed=True)
            _tell(make, Path(folder), range(0), status="failed")
        await asyncio.sleep(0)

    finish(check(), "the sink")


def _tell(make: Callable[[], Callback], run_dir: Path, steps: range, *, resumed: bool = False, status: str = "finished") -> None:
    sink = _called("making the sink", make)
    require(callable(getattr(sink, "on_metrics", None)), f"{type(sink).__name__} has no method on_metrics(event)")
    begin = RunBegin(config=MappingProxyType({"run": {"seed": 0}}), run_dir=run_dir, resumed=resumed, step=steps.start - resumed)
    ended = RunEnd(status=status, summary=MappingProxyType({"status": status}))
    # Views that cannot be changed, so that a sink which changes its metrics fails here.
    rows = [MetricsRow(step=step, metrics=MappingProxyType(dict(ROWS[step]))) for step in steps]
    for method, event in (("on_run_begin", begin), *(("on_metrics", row) for row in rows), ("on_run_end", ended)):
        if (call := getattr(sink, method, None)) is not None:
            _called(f"{type(sink).__name__}.{method}({event})", call, event, nothing=True)


def _called(where: str, call: Callable[..., Any], *arguments: Any, nothing: bool = False) -> Any:
    started_s = time.monotonic()
    try:
        returned = call(*arguments)
    except Exception as error:
        raise AssertionError(f"{where} raised {type(error).__name__}: {error}") from error
    took_s = time.monotonic() - started_s
    require(not inspect.isawaitable(returned), f"{where} is asynchronous: a sink has plain methods")
    require(not nothing or returned is None, f"{where} returned {returned!r}: a sink returns nothing")
    require(took_s <= MAX_CALL_S, f"{where} took {took_s:.1f} s, for which a run would wait: send in a thread of your own")
    return returned


def _compare(written: Sequence[Mapping[str, float]]) -> None:
    require(len(written) == len(ROWS), f"the sink was given {len(ROWS)} rows, and {len(written)} were written")
    for step, (given, row) in enumerate(zip(ROWS, written, strict=True)):
        for name, value in given.items():
            require(name in row, f"{name} of step {step} was not written")
            off = abs(row[name] - value)
            require(off <= 1e-6 * abs(value), f"{name} of step {step} is {row[name]} where {value} was given")
