"""One rollout worker's place in the pool: whether it may be given work, and why not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import anyio

from agentrl.core.protocols import EngineStats, RolloutWorker

Respawn: TypeAlias = Callable[[str], Awaitable[RolloutWorker]]
"""Ends what is left of the worker with this name and starts another in its place, at version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How lost workers are found and replaced.

    Attributes:
        respawn: Replaces a worker.
        max_restarts: Replacements of one worker; after them it is given up.
        check_every_s: Time between two looks at a worker.
        answer_timeout_s: A worker that does not say its counters in this time did not answer; three times make it lost.
        stuck_s: An engine that is busy this long without finishing one request is lost.
        load_timeout_s: Loading weights may take this long.
    """

    respawn: Respawn
    max_restarts: int = 3
    check_every_s: float = 5.0
    answer_timeout_s: float = 30.0
    stuck_s: float = 300.0
    load_timeout_s: float = 300.0


class Standing(StrEnum):
    """Whether a worker may be given work."""

    READY = "ready"
    """It holds the current weights."""
    LOST = "being replaced"
    """It is dead or set aside, and its place is to be filled."""
    GONE = "given up"
    """It is dead and stays so."""


@dataclass(slots=True, eq=False)
class Seat:
    """A worker and what the pool knows of it.

    Attributes:
        name: Stays the same when the worker is replaced.
        worker: Runs the groups.
        live_episodes: Episodes it runs now.
        standing: Whether it is given work.
        reason: Why it was lost last.
        restarts: How often it was replaced.
        scopes: The groups it runs; cancelled when it is lost.
        unanswered: Looks in a row that it did not answer.
        seen: Its counters when it last finished a request.
    """

    name: str
    worker: RolloutWorker
    live_episodes: int = 0
    standing: Standing = Standing.READY
    reason: str = ""
    restarts: int = 0
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    unanswered: int = 0
    seen: EngineStats = field(default_factory=EngineStats)

    @property
    def ready(self) -> bool:
        """Whether it may be given work."""
        return self.standing is Standing.READY

    def lose(self, reason: str, standing: Standing) -> None:
        """Give it no more work, and take back what it has."""
        self.standing, self.reason = standing, reason
        for scope in self.scopes:
            scope.cancel()

    def fill(self, worker: RolloutWorker) -> None:
        """Put a new worker, which holds the current weights, in its place."""
        self.worker, self.standing, self.unanswered, self.seen = worker, Standing.READY, 0, EngineStats()

    def is_stuck(self, stats: EngineStats, stuck_s: float) -> bool:
        """Whether the engine was busy for `stuck_s` without finishing a request; to be called again and again."""
        if stats.tokens != self.seen.tokens or stats.busy_s <= self.seen.busy_s:
            self.seen = stats
        return stats.busy_s - self.seen.busy_s >= stuck_s

    async def look(self, supervision: Supervision) -> str | None:
        """Ask for the worker's counters; why it is lost, `None` if it is not."""
        try:
            async with asyncio.timeout(supervision.answer_timeout_s):
                stats = await self.worker.stats()
        except Exception as error:
            self.unanswered += 1
            return f"did not answer {self.unanswered} times: {type(error).__name__}: {error}" if self.unanswered >= MAX_UNANSWERED else None
        self.unanswered = 0
        if stats.fault:
            return stats.fault
        if self.is_stuck(stats, supervision.stuck_s):
            return f"was busy for {stats.busy_s - self.seen.busy_s:.0f} s and finished no request (--engine-timeout-s)"
        return None


MAX_UNANSWERED = 3
