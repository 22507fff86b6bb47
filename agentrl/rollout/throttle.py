"""Limit of concurrent episodes beside one engine: as many as it can serve, in the order of admission of their groups.

More episodes than the engine's cache can hold do not make it faster: requests wait in its queue, where the first turn of a new
group stands before the next turn of an old one, and the keys and values of old conversations are thrown out before their next
turn wants them. So whole groups are held back before they begin. Nothing that began is stopped, and what an episode samples does
not depend on when it begins, so a limit changes no result, only times.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.core.protocols import EngineLoad, EngineStats, LoadSums
from agentrl.core.types import Ticket

TICK_S = 0.1
KV_HIGH, KV_LOW = 0.9, 0.75
WAITING_HIGH = 0.25  # of the requests being decoded
BACK_OFF = 0.8
STEP_UP = 0.05


@dataclass(slots=True)
class AdaptiveLimit:
    """Limit of concurrent episodes with additive increase and multiplicative decrease, from the engine's reported load.

    The engine is overloaded if its cache is nearly full or its queue is long compared with the decoding requests. The limit then
    falls to a fraction of the live episodes, and does not fall again before that many have ended. If the cache has room, no request
    waits and the limit holds groups back, the limit rises: it doubles until the first overload, and then grows in small steps.
    Otherwise it stays.

    Attributes:
        limit: Maximum number of concurrent episodes.
        floor: Lowest value of the limit.
        pressed: True after the first overload.
    """

    limit: int
    floor: int = 1
    pressed: bool = False

    def observe(self, load: EngineLoad, live: int, held: bool) -> None:
        """Take in the engine's load.

        Args:
            load: As it is now.
            live: Episodes under way.
            held: Whether a group waits to begin.
        """
        if load.kv_usage >= KV_HIGH or load.waiting > max(1.0, WAITING_HIGH * load.running):
            self.pressed = True
            if live <= self.limit:
                self.limit = max(self.floor, math.floor(BACK_OFF * min(live, self.limit)))
        elif held and load.kv_usage <= KV_LOW and load.waiting == 0:
            self.limit += max(1, math.ceil(STEP_UP * self.limit)) if self.pressed else self.limit


class Throttle:
    """Lets groups begin.

    Args:
        fixed: Episodes at once; 0 follows the engine's load.
        start: Where the limit begins if it follows the load.
        stats: The engine's counters.
        clock: Seconds, monotonic.
    """

    def __init__(self, fixed: int, start: int, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._fixed, self._adaptive, self._stats, self._clock = fixed, AdaptiveLimit(max(1, start)), stats, clock
        self._held: list[tuple[tuple[bool, int, int], int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._live = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = 0.0
        self._sums = LoadSums()

    @property
    def limit(self) -> int:
        """Episodes at once now."""
        return self._fixed or self._adaptive.limit

    @property
    def live(self) -> int:
        """Episodes under way."""
        return self._live

    @property
    def sums(self) -> LoadSums:
        """The load so far."""
        return self._sums

    async def enter(self, ticket: Ticket) -> None:
        """Wait until the ticket's episodes may begin; each must `leave` then.

        All of a group begin together, since they may wait for each other, and a group always begins when nothing else is under way, so
        none waits forever. Groups that measure the model come first, because the learner waits for them, then those admitted first.

        Consumes room for the group. Waits for episodes to end or the limit to rise; unblocked by `leave` and by the tick.
        """
        self._adaptive.floor = max(self._adaptive.floor, ticket.n_samples_per_prompt)
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        priority = (ticket.eval_sampling is None, ticket.group_id, ticket.attempt)
        heapq.heappush(self._held, (priority, next(self._order), ticket.n_samples_per_prompt, begun))
        self._begin_next()
        if self._timer is None:
            self._looked_s = self._clock()
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        try:
            await begun
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled():
                self.leave(ticket.n_samples_per_prompt)
            raise

    def leave(self, episodes: int = 1) -> None:
        """Say that episodes have ended."""
        if episodes and self._timer is not None:
            self._look()
        self._live -= episodes
        self._begin_next()
        if not self._live and not self._held:
            self.close()

    def close(self) -> None:
        """Stop looking at the engine; safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_next(self) -> None:
        while self._held:
            *_, episodes, begun = self._held[0]
            if not begun.done() and self._live and self._live + episodes > self.limit:
                return
            heapq.heappop(self._held)
            if not begun.done():  # else it was cancelled
                self._live += episodes
                begun.set_result(None)

    def _tick(self) -> None:
        """Look at the engine, again and again while anything is under way."""
        load = self._look()
        self._adaptive.observe(load, self._live, bool(self._held))
        self._begin_next()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _look(self) -> EngineLoad:
        now_s, load = self._clock(), self._stats().load
        self._sums = self._sums.plus(load, self._live, now_s - self._looked_s)
        self._looked_s = now_s
        return load
