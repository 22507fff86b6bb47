"""Times of tools within `reset` and `step`: what user code marks with `timed` is recorded with the episode."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

from agentrl.core.types import Span

TOOL = "tool:"
"""Begins the names of such spans, which may be any other way."""
MAX_SPANS = 200
"""Spans that are kept of one call of user code."""
MAX_NAME = 80
"""Characters that are kept of a name."""


class Stopwatch:
    """Collects the times of tools within one call of user code after another."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()
        self._spans: list[Span] = []

    def begin(self) -> None:
        """Begin with a call: later times are counted from now, and those of the call before are forgotten."""
        self._begin_s, self._spans = time.perf_counter(), []

    def add(self, name: str, start_s: float, end_s: float) -> None:
        """Add a tool that began and ended at these times of `time.perf_counter`."""
        if len(self._spans) < MAX_SPANS:
            self._spans.append(Span(f"{TOOL}{name[:MAX_NAME]}", None, start_s - self._begin_s, end_s - start_s))

    def take(self) -> tuple[Span, ...]:
        """Return what was collected since the beginning of the call, in seconds since then, and forget it."""
        if not self._spans:
            return ()
        found, self._spans = tuple(self._spans), []
        return found


_STOPWATCH: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)
"""The stopwatch of the episode whose user code runs; threads and tasks that user code starts inherit it."""


def use_stopwatch(stopwatch: Stopwatch) -> None:
    """Have `timed` report to a stopwatch in this context and in those that are copied from it."""
    _STOPWATCH.set(stopwatch)


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Record the time of a tool, or of any other part of an environment's or agent's code, with the episode.

    `agentrl view` and `agentrl export --otel` show it beside the turn. Outside of an episode nothing is recorded.

    Example:
        >>> with timed("search"):
        ...     pass
    """
    start = time.perf_counter()
    try:
        yield
    finally:
        stopwatch = _STOPWATCH.get()
        if stopwatch is not None:
            stopwatch.add(name, start, time.perf_counter())
