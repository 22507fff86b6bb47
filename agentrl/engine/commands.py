"""Commands of other threads to the thread that owns a model, which runs them between two steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

GATHER_S = 0.001
"""Time that further commands are awaited before a step, as long as they keep coming; a step takes milliseconds at least."""
GATHER_ROUNDS, IDLE_ROUNDS = 4, 64
"""Times that this is done, with requests under way and without any, which would have to wait for the others."""


class CommandQueue:
    """Filled by any thread, served by one."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def put(self, command: Callable[[], object] | None) -> None:
        """Queue a command; `None` ends the thread."""
        self._commands.put(command)

    def serve(self, runnable: Callable[[], bool]) -> bool:
        """Run what is queued, waiting for a command if there is nothing to step; False ends the thread.

        Requests tend to come in bursts, and a step for one costs little less than a step for a hundred. So after a command
        others are awaited for a moment, as long as they keep coming.
        """
        idle = not runnable()
        served = self._serve_queued(block=idle)
        for _ in range(IDLE_ROUNDS if idle else GATHER_ROUNDS):
            if not served or not runnable():
                break
            time.sleep(GATHER_S)
            served = self._serve_queued(block=False)
        return served is not None

    def drain(self) -> None:
        """Run what came too late, which has to see by itself that the thread has ended."""
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command()

    def _serve_queued(self, *, block: bool) -> int | None:
        """Run what is queued; how many commands that were, or `None` if one was to end."""
        served = 0
        while True:
            try:
                command = self._commands.get(block=block and not served)
            except queue.Empty:
                return served
            if command is None:
                return None
            served += 1
            command()
