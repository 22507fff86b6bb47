"""The accounts of an engine's time and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentrl.core.protocols import EngineLoad, EngineStats

MAX_FAILURES = 3
_NO_LOAD = EngineLoad()


class UsageMeter:
    """Adds up busy time, paused time and tokens; changes happen on one event loop.

    An engine that fails several requests in a row counts as faulty, however healthy it calls itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._active = 0
        self._pauses = 0  # a sleeping engine may be paused for a publication too
        self._busy_s = self._paused_s = 0.0
        self._tokens = self._prompt_tokens = self._cached_tokens = 0
        self._failures: list[str] = []  # of the latest requests in a row

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        return self._active

    def begin(self, prompt_tokens: int) -> None:
        """A request of `prompt_tokens` tokens was accepted."""
        self._advance()
        self._active += 1
        self._prompt_tokens += prompt_tokens

    def end(self) -> None:
        """A request ended, in whatever way."""
        self._advance()
        self._active -= 1

    def produced(self, tokens: int, cached_tokens: int) -> None:
        """A request ended well: `tokens` were sampled, `cached_tokens` of its prompt came from the prefix cache."""
        self._failures.clear()
        self._tokens += tokens
        self._cached_tokens += cached_tokens

    def failed(self, reason: str) -> None:
        """A request failed although nothing was wrong with it."""
        self._failures.append(reason)

    def pause(self) -> None:
        """Generation stopped for a publication, or to sleep."""
        self._advance()
        self._pauses += 1

    def resume(self) -> None:
        """Generation goes on, once as often as it stopped."""
        self._advance()
        self._pauses -= 1

    def stats(self, *, load: EngineLoad | None = None, kv_tokens: int = 0, fault: str = "") -> EngineStats:
        """Counters up to now, and what the engine knows besides: its load, room of its cache, and why it cannot be used."""
        self._advance()
        return EngineStats(
            busy_s=self._busy_s,
            clock_s=self._last - self._start,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            paused_s=self._paused_s,
            fault=fault or self._fault(),
            load=load or _NO_LOAD,
            kv_tokens=kv_tokens,
        )

    def _fault(self) -> str:
        count = len(self._failures)
        return f"{count} requests failed one after another, the last with {self._failures[-1]}" if count >= MAX_FAILURES else ""

    def _advance(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        if self._pauses:
            self._paused_s += passed
        elif self._active:
            self._busy_s += passed
