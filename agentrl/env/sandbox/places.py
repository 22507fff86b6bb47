"""Places for sandboxes: so many run at a time, and so many start, apart from those that run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from weakref import WeakKeyDictionary

from agentrl.env.sandbox.place_files import PlaceFile, folder_of, take_place
from agentrl.env.sandbox.spec import Episode, SandboxChoice, current_choice, current_episode
from agentrl.env.timing import timed

MAX_STARTING = 2 * (os.cpu_count() or 1)
"""Programs of one event loop that start at a time, unless the run says how many: more would take each other's time."""
LOOK_S, MAX_LOOK_S = 0.02, 0.5
"""Seconds between the first two looks for a place that another process gives back, and between later ones."""
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = WeakKeyDictionary()
_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()


def starting() -> asyncio.Semaphore:
    """Return the places of programs that start in the running loop."""
    limit = current_choice().max_starting or MAX_STARTING
    return _STARTING.setdefault(asyncio.get_running_loop(), {}).setdefault(limit, asyncio.Semaphore(limit))


class RunningPlace:
    """A place of a sandbox that runs. An episode that has one does not wait for another, as two such would wait for each other."""

    def __init__(self) -> None:
        self._episode: Episode | None = None
        self._file: PlaceFile | None = None

    async def take(self) -> None:
        """Wait for the place."""
        episode, choice = current_episode(), current_choice()
        if choice.max_running and not episode.num_sandboxes:
            with timed("sandbox wait"):
                self._file = await _queue().take(choice)
        self._episode = episode
        episode.num_sandboxes += 1

    def give_back(self) -> None:
        """Let another sandbox have the place, if this one has it."""
        if self._episode is not None:
            self._episode.num_sandboxes -= 1
        if self._file is not None:
            self._file.give_back()
            _queue().given_back.set()
        self._episode = self._file = None


class _Queue:
    """Sandboxes of one event loop that wait; the first of them looks for a place, which other processes may have given back."""

    def __init__(self) -> None:
        self._first = asyncio.Lock()
        self.given_back = asyncio.Event()

    async def take(self, choice: SandboxChoice) -> PlaceFile:
        """Wait for a place of the run."""
        folder, wait_s = folder_of(choice.places or f"process {os.getpid()}"), LOOK_S
        async with self._first:
            while True:
                # Cleared before the look, so that a place that is given back after the look is noticed.
                self.given_back.clear()
                place = take_place(folder, choice.max_running)
                if place is not None:
                    return place
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self.given_back.wait()
                wait_s = min(2 * wait_s, MAX_LOOK_S)


def _queue() -> _Queue:
    return _QUEUES.setdefault(asyncio.get_running_loop(), _Queue())
