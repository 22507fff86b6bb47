"""Places for sandboxes: so many run at a time, and so many start, apart from those that run."""

from __future__ import annotations

import asyncio
import os
from weakref import WeakKeyDictionary

from agentrl.env.sandbox.spec import Episode, current_choice, current_episode
from agentrl.env.timing import timed

MAX_STARTING = 2 * (os.cpu_count() or 1)
"""Programs of one event loop that start at a time, unless the run says how many: more would take each other's time."""
_PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()


def starting() -> asyncio.Semaphore:
    """Return the places of programs that start in the running loop."""
    return _places("starting", current_choice().max_starting or MAX_STARTING)


class RunningPlace:
    """A place of a sandbox that runs. An episode that has one does not wait for another, as two such would wait for each other."""

    def __init__(self) -> None:
        self._episode: Episode | None = None
        self._places: asyncio.Semaphore | None = None

    async def take(self) -> None:
        """Wait for the place."""
        episode, limit = current_episode(), current_choice().max_running
        if limit and not episode.num_sandboxes:
            places = _places("running", limit)
            with timed("sandbox wait"):
                await places.acquire()
            self._places = places
        self._episode = episode
        episode.num_sandboxes += 1

    def give_back(self) -> None:
        """Let another sandbox have the place, if this one has it."""
        if self._episode is not None:
            self._episode.num_sandboxes -= 1
        if self._places is not None:
            self._places.release()
        self._episode = self._places = None


def _places(name: str, limit: int) -> asyncio.Semaphore:
    places = _PLACES.setdefault(asyncio.get_running_loop(), {})
    return places.setdefault((name, limit), asyncio.Semaphore(limit))
