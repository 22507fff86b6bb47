"""Who waits for what since when, and an end to waits that last too long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import anyio

from agentrl.core.errors import StallError

MAX_NAMES = 40


class WaitBoard:
    """Where each loop says what it waits for, and where progress is noted.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[str, tuple[str, float]] = {}
        self.last_progress_s = clock()

    def waiting(self, owner: str, what: str) -> None:
        """Say that `owner` waits for `what` from now on."""
        self._waits[owner] = (what, self._clock())

    def progress(self) -> None:
        """Note that a group finished or a step ended."""
        self.last_progress_s = self._clock()

    def describe(self) -> str:
        """One line per owner: what it waits for, and for how long."""
        now = self._clock()
        return "\n".join(f"  {owner}: {what}, for {now - since:.1f} s" for owner, (what, since) in self._waits.items())


async def watch_for_stall(board: WaitBoard, timeout_s: float, details: Callable[[], str], clock: Callable[[], float]) -> None:
    """End the run when nothing progresses.

    Consumes the board's time of last progress. Produces an error with a diagnosis. Waits for `timeout_s` to pass since the
    last progress. Unblocked by time alone.

    Raises:
        StallError: If no group finished and no step ended for `timeout_s`.
    """
    while True:
        quiet_s = clock() - board.last_progress_s
        if quiet_s >= timeout_s:
            break
        await anyio.sleep(timeout_s - quiet_s)
    raise StallError(
        f"no group finished and no step ended for {quiet_s:.1f} s. If episodes or steps really take that long, "
        f"raise --stall-timeout-s {timeout_s:g}. Who waits for what:\n{board.describe()}\n{details()}\n  tasks: {task_names()}"
    )


def task_names() -> str:
    """Names of the unfinished asyncio tasks; a long list is cut to a count."""
    names = Counter(task.get_name() for task in asyncio.all_tasks())
    shown = [f"{name} (x{count})" if count > 1 else name for name, count in sorted(names.items())]
    return ", ".join(shown[:MAX_NAMES]) + (f", and {len(shown) - MAX_NAMES} more" if len(shown) > MAX_NAMES else "")
