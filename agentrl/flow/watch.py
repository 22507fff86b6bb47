"""Who waits for what since when, and an end to waits that last too long."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import anyio

from agentrl.core.errors import StallError
from agentrl.flow.stall import StallReport

_log = logging.getLogger(__name__)

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


async def watch_for_stall(
    board: WaitBoard, timeout_s: float, details: Callable[[], str], clock: Callable[[], float], report: StallReport | None = None
) -> None:
    """Warn when nothing has progressed for half the time-out, and end the run at the whole.

    Consumes the board's time of last progress. Produces one warning per stall, then a report and an error with a diagnosis. Waits
    for `timeout_s` to pass since the last progress, and then a few seconds for the processes to say what they do. Unblocked by time alone.

    Raises:
        StallError: If no group finished and no step ended for `timeout_s`.
    """
    warned_s = -1.0  # last progress before the stall that was warned of
    while (quiet_s := clock() - board.last_progress_s) < timeout_s:
        if quiet_s >= timeout_s / 2 and warned_s != board.last_progress_s:
            warned_s = board.last_progress_s
            told = f"the run ends after {timeout_s:g} s (--stall-timeout-s)"
            _log.warning("nothing has finished for %.1f s; %s. Who waits for what:\n%s", quiet_s, told, board.describe())
        next_s = timeout_s if warned_s == board.last_progress_s else timeout_s / 2
        await anyio.sleep(next_s - quiet_s)
    found = (
        f"no group finished and no step ended for {quiet_s:.1f} s. If episodes or steps really take that long, "
        f"raise --stall-timeout-s {timeout_s:g}. Who waits for what:\n{board.describe()}\n{details()}\n  tasks: {task_names()}"
    )
    raise StallError(found if report is None else f"{found}\n{await report.write(found)}")


def task_names() -> str:
    """Names of the unfinished asyncio tasks; a long list is cut to a count."""
    names = Counter(task.get_name() for task in asyncio.all_tasks())
    shown = [f"{name} (x{count})" if count > 1 else name for name, count in sorted(names.items())]
    return ", ".join(shown[:MAX_NAMES]) + (f", and {len(shown) - MAX_NAMES} more" if len(shown) > MAX_NAMES else "")
