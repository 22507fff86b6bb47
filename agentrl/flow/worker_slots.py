"""The workers of a pool one by one: what is known of each, when one is lost, and which has the least to do."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from agentrl.core.protocols import EngineStats, RolloutWorker

_log = logging.getLogger(__name__)

Respawn: TypeAlias = Callable[[str], Awaitable[RolloutWorker]]
"""Ends what is left of the worker with this name, if there was one, and starts another in its place, at version 0."""

Retire: TypeAlias = Callable[[str], Coroutine[Any, Any, None]]
"""Ends the worker with this name and gives its resources back."""

FindBlock: TypeAlias = Callable[[str], Awaitable[str]]
"""Returns where user code blocks the worker with this name, in words; empty if it does not."""


LOAD_TIMEOUT_S = 300.0


Room: TypeAlias = Callable[[], int | None]
"""Returns how many more workers have room now; `None` where nobody knows."""


def _unknown_room() -> None:
    return


async def _no_block(name: str) -> str:
    return ""


async def _nothing_to_retire(name: str) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Settings for finding and replacing lost workers."""

    respawn: Respawn  # replaces a worker, or starts one more
    retire: Retire = _nothing_to_retire  # ends a worker that leaves
    room: Room = _unknown_room  # for workers that join
    find_block: FindBlock = _no_block  # asked of a worker that has not answered for `slow_s`
    slow_s: float = 10.0
    max_restarts: int = 3  # replacements of one worker; after them it is given up
    check_every_s: float = 5.0  # time between two looks at a worker
    answer_timeout_s: float = 30.0  # a worker that does not say its counters in this time did not answer; three times make it lost
    stuck_s: float = 300.0  # an engine that is busy this long without finishing one request is lost
    load_timeout_s: float = LOAD_TIMEOUT_S  # loading weights may take this long


class WorkerState(StrEnum):
    """State of a worker, which decides whether it gets work."""

    READY = "ready"
    """The worker holds the current weights."""
    WAITING = "waits for weights"
    """The worker has replaced a lost one, and takes part in the next publication."""
    LOST = "being replaced"
    """The worker is dead or set aside, and its place is to be filled."""
    GONE = "given up"
    """The worker is dead or has left, and is not replaced."""


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A worker and what the pool knows of it."""

    name: str  # stays the same when the worker is replaced
    worker: RolloutWorker  # runs the groups
    live_episodes: int = 0  # episodes it runs now
    state: WorkerState = WorkerState.READY  # whether it is given work
    reason: str = ""  # why it was lost last
    restarts: int = 0  # number of times that it was replaced
    groups: set[asyncio.Timeout] = field(default_factory=set)  # the groups it runs, without a deadline; expired when it is lost
    unanswered: int = 0  # looks in a row that it did not answer
    blocked: str = ""  # where user code blocked it at the latest look
    seen: EngineStats = field(default_factory=EngineStats)  # its counters when it last finished a request

    @property
    def ready(self) -> bool:
        """True if the worker may get work."""
        return self.state is WorkerState.READY

    @property
    def takes_weights(self) -> bool:
        """True if a publication is for the worker too."""
        return self.state in (WorkerState.READY, WorkerState.WAITING)

    def wait(self, worker: RolloutWorker) -> None:
        """Put a new worker in its place that is given work once it has taken part in a publication."""
        self.worker, self.state = worker, WorkerState.WAITING

    def lose(self, reason: str, state: WorkerState) -> None:
        """Give it no more work, and take back what it has."""
        self.state, self.reason = state, reason
        # Expired, not cancelled: so `run_group` tells a lost worker from the end of the run, and runs the group again.
        for group in self.groups:
            if not group.expired():
                group.reschedule(asyncio.get_running_loop().time())

    def fill(self, worker: RolloutWorker) -> None:
        """Put a new worker, which holds the current weights, in its place."""
        self.worker, self.state, self.unanswered, self.seen = worker, WorkerState.READY, 0, EngineStats()
        self.blocked = ""

    def is_stuck(self, stats: EngineStats, stuck_s: float) -> bool:
        """Return True if the engine was busy for `stuck_s` without finishing a request; called repeatedly."""
        if stats.tokens != self.seen.tokens or stats.busy_s <= self.seen.busy_s:
            self.seen = stats
        return stats.busy_s - self.seen.busy_s >= stuck_s

    async def look(self, supervision: Supervision) -> str | None:
        """Ask for the worker's counters; why it is lost, `None` if it is not."""
        asked = asyncio.ensure_future(self.worker.stats())
        try:
            # No deadline yet: the answer of a slow worker is still waited for, while it is asked where user code blocks it.
            await asyncio.wait({asked}, timeout=supervision.slow_s)
            if not asked.done():
                await self._look_for_block(supervision)
            async with asyncio.timeout(supervision.answer_timeout_s):
                stats = await asked
        except Exception as error:
            self.unanswered += 1
            cause = self.blocked or f"{type(error).__name__}: {error}"
            return f"did not answer {self.unanswered} times: {cause}" if self.unanswered >= MAX_UNANSWERED else None
        finally:
            asked.cancel()
        self.unanswered, self.blocked = 0, ""
        if stats.fault:
            return stats.fault
        if self.is_stuck(stats, supervision.stuck_s):
            return f"was busy for {stats.busy_s - self.seen.busy_s:.0f} s and finished no request (--engine-timeout-s)"
        return None

    async def _look_for_block(self, supervision: Supervision) -> None:
        """Find and say where user code blocks the worker; a worker that cannot be asked is not blocked."""
        try:
            async with asyncio.timeout(supervision.slow_s):
                found = await supervision.find_block(self.name)
        except Exception:
            found = ""
        if found and found != self.blocked:
            _log.warning("%s does not go on: %s", self.name, found)
        self.blocked = found


MAX_UNANSWERED = 3


class LeastLoaded:
    """Keeps slots in order of their live episodes, so that a choice among thousands takes microseconds; ties go to the first slot."""

    def __init__(self, slots: Iterable[WorkerSlot]) -> None:
        self._slots: list[WorkerSlot] = []
        self._number: dict[str, int] = {}
        self._listed: list[int | None] = []  # the load of each slot's one valid entry
        self._heap: list[tuple[int, int]] = []  # load, number of the slot; entries that are no longer valid are passed over
        for slot in slots:
            self.add(slot)

    def add(self, slot: WorkerSlot) -> None:
        """Take in one more slot."""
        self._number[slot.name] = len(self._slots)
        self._slots.append(slot)
        self._listed.append(None)
        self.update(slot)

    def update(self, slot: WorkerSlot) -> None:
        """To be called when a slot's load has changed, or when it is ready again."""
        number = self._number[slot.name]
        if self._listed[number] != slot.live_episodes:
            self._listed[number] = slot.live_episodes
            heapq.heappush(self._heap, (slot.live_episodes, number))
            # Outdated entries stay until they reach the top, so the heap grows with every change of a load.
            if len(self._heap) > 4 * len(self._slots) + 64:
                self._rebuild()

    def first(self) -> WorkerSlot | None:
        """The ready slot with the fewest live episodes; `None` if none is ready."""
        while self._heap:
            load, number = self._heap[0]
            if self._listed[number] == load:
                if self._slots[number].ready:
                    return self._slots[number]
                self._listed[number] = None  # `update` lists it when it is ready again
            heapq.heappop(self._heap)
        return None

    def _rebuild(self) -> None:
        """Leave out what is no longer valid."""
        self._heap = [(load, number) for number, load in enumerate(self._listed) if load is not None]
        heapq.heapify(self._heap)
