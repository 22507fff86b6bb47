"""Several rollout workers on one engine, as one worker of the pool: one Python process does not feed an engine of many GPUs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from agentrl.core.errors import AgentRLError, EngineDeadError, EngineError, RolloutWorkerDeadError
from agentrl.core.protocols import EngineStats, GroupRef, LoadSums, Memory, RolloutWorker, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest

_log = logging.getLogger(__name__)


class EngineProcess(Protocol):
    """The engine that the workers share, and the means to replace one of them."""

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `Engine.load_weights`."""
        ...

    async def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        ...

    async def close(self) -> None:
        """As `Engine.close`."""

    async def release(self, worker: RolloutWorker) -> None:
        """End what is left of a worker; returns when the engine has forgotten its requests."""

    async def respawn(self) -> RolloutWorker:
        """Start one more worker."""
        ...


@dataclass(slots=True, eq=False)
class _Place:
    """A worker and what is known of it."""

    index: int
    worker: RolloutWorker | None  # `None` while it is replaced, and for good if it is given up
    live_episodes: int = 0
    restarts: int = 0
    rss_mib: float = 0.0  # of the present worker when it last said so
    sums: LoadSums = field(default_factory=LoadSums)  # of the present worker when it last said them
    past: LoadSums = field(default_factory=LoadSums)  # of those before


class FrontEnds:
    """Rollout workers that share one engine; see `agentrl.core.protocols.RolloutWorker`.

    A group runs on the worker with the fewest live episodes, all of it on the same one. If a worker is lost, its groups run again on the
    others from their beginning, under the same seeds, and it is replaced, `max_restarts` times at most; the engine goes on. If the
    engine is lost, everything is: the caller replaces all of it.
    """

    def __init__(self, engine: EngineProcess, workers: Sequence[RolloutWorker], max_restarts: int) -> None:
        self._engine, self._max_restarts = engine, max_restarts
        self._places = [_Place(index, worker) for index, worker in enumerate(workers)]
        self._changed = asyncio.Event()
        self._replacing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._tool_parser = ""

    async def start(self) -> None:
        """Start every worker; the first that asks for the engine starts it."""
        await asyncio.gather(*(place.worker.start() for place in self._places if place.worker))

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, GroupRef]:
        """As `RolloutWorker.run_group`; again on another worker if one is lost meanwhile.

        Raises:
            EngineDeadError: If the engine is gone, or every worker.
        """
        while True:
            place = await self._least_loaded()
            worker = place.worker
            place.live_episodes += group_request.num_episodes
            try:
                if worker is not None:
                    return await worker.run_group(group_request)
            except RolloutWorkerDeadError as error:
                await self._lose(place, worker, str(error))
            finally:
                place.live_episodes -= group_request.num_episodes

    async def load_weights(self, update: WeightUpdate) -> int:
        """As `RolloutWorker.load_weights`; episodes go on and wait inside the engine."""
        return await self._engine.load_weights(update)

    async def sleep(self, level: int) -> None:
        """As `RolloutWorker.sleep`; the configuration allows none.

        Raises:
            EngineError: Always.
        """
        raise EngineError("an engine that several rollout workers share cannot sleep; leave out --rollout-workers-per-engine or --colocate")

    async def wake(self, *parts: Memory) -> None:
        """As `RolloutWorker.wake`; nothing sleeps."""

    async def stats(self) -> EngineStats:
        """Counters of the engine, and the memory of the largest worker; each is asked, so that one that hangs or is gone is noticed."""
        stats, _ = await asyncio.gather(self._engine.stats(), asyncio.gather(*map(self._note_sums, self._places)))
        sums = combined([_added(place.past, place.sums) for place in self._places])
        return replace(stats, sums=sums, tool_parser=self._tool_parser, rss_mib=max(place.rss_mib for place in self._places))

    async def close(self) -> None:
        """Close the workers, then the engine; safe to call twice."""
        self._closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*(place.worker.close() for place in self._places if place.worker), return_exceptions=True)
        await self._engine.close()

    async def _least_loaded(self) -> _Place:
        """The worker with the fewest live episodes; waits for one while all are being replaced."""
        while not (there := [place for place in self._places if place.worker]):
            if not self._replacing:
                raise EngineDeadError("every rollout worker of the engine is gone")
            await self._changed.wait()
        return min(there, key=lambda place: place.live_episodes)

    async def _note_sums(self, place: _Place) -> None:
        worker = place.worker
        try:
            if worker is not None:
                stats = await worker.stats()
                place.sums = stats.sums if place.worker is worker else place.sums
                self._tool_parser, place.rss_mib = stats.tool_parser, stats.rss_mib
        except RolloutWorkerDeadError as error:
            await self._lose(place, worker, str(error))

    async def _lose(self, place: _Place, worker: RolloutWorker | None, reason: str) -> None:
        """Take a worker out, once, and have it replaced; returns when its requests are out of the engine."""
        if place.worker is worker and worker is not None and not self._closed:
            _log.warning("rollout worker %d of an engine is lost: %s", place.index, reason)
            place.worker = None
            place.past, place.sums = _added(place.past, place.sums), LoadSums()
            replacing = asyncio.create_task(self._replace(place), name=f"replace rollout worker {place.index}")
            self._replacing.add(replacing)
            replacing.add_done_callback(self._replaced)
        if worker is not None:
            await self._engine.release(worker)

    async def _replace(self, place: _Place) -> None:
        if place.restarts >= self._max_restarts:
            _log.warning("rollout worker %d of an engine is given up (--max-engine-restarts)", place.index)
            return
        place.restarts += 1
        try:
            place.worker = await self._engine.respawn()
        except (AgentRLError, TimeoutError) as error:
            _log.warning("rollout worker %d of an engine could not be replaced: %s: %s", place.index, type(error).__name__, error)

    def _replaced(self, task: asyncio.Task[None]) -> None:
        self._replacing.discard(task)
        # Wakes those that wait now; whoever waits later gets a new event.
        self._changed.set()
        self._changed = asyncio.Event()


def _added(before: LoadSums, after: LoadSums) -> LoadSums:
    return LoadSums(
        seconds=before.seconds + after.seconds,
        kv_usage=before.kv_usage + after.kv_usage,
        waiting=before.waiting + after.waiting,
        episodes=before.episodes + after.episodes,
    )


def combined(sums: Sequence[LoadSums]) -> LoadSums:
    """Return the load of an engine as several rollout workers saw it at the same time.

    Episodes add up. Cache and queue are the engine's, so each worker saw the same ones: they are means over the workers' seconds.
    """
    longest, together = max((each.seconds for each in sums), default=0.0), sum(each.seconds for each in sums)
    if not together:
        return LoadSums()
    share = longest / together
    return LoadSums(
        seconds=longest,
        kv_usage=share * sum(each.kv_usage for each in sums),
        waiting=share * sum(each.waiting for each in sums),
        episodes=sum(each.episodes for each in sums),
    )
