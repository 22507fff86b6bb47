"""Diagnosis of a run that stalls: who waits for what, and the stacks of every process that still answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import anyio

from agentrl.core.errors import StallError
from agentrl.core.process import describe_process

ANSWER_TIMEOUT_S = 5.0


Diagnose: TypeAlias = Callable[[], Mapping[str, Awaitable[str]]]
"""Asks the other processes of a run, by their names, what they are doing; a request may fail, and need not be answered."""


class StallReport:
    """Writes RUN_DIR/stall-<time>.txt, with the answers of the other processes, which have `answer_timeout_s` for them."""

    def __init__(self, run_dir: Path, diagnose: Diagnose = dict, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._run_dir, self._diagnose, self._timeout_s = run_dir, diagnose, answer_timeout_s

    async def write(self, summary: str) -> str:
        """Write the report, which begins with `summary`; returns a sentence that says where it is, or why not. Never raises."""
        parts = {"driver": describe_process([asyncio.get_running_loop()]), **await self._others()}
        text = "\n\n".join([summary, *(f"== {name}\n{told}" for name, told in parts.items())]) + "\n"
        path = self._run_dir / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        try:
            await asyncio.to_thread(path.write_text, text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            return f"The stacks of all processes could not be written to {path}: {error}"
        return f"Stacks of all threads and tasks: {path}"

    async def _others(self) -> dict[str, str]:
        try:
            asked = {name: asyncio.ensure_future(request) for name, request in self._diagnose().items()}
        except Exception as error:
            return {"the other processes": f"could not be asked: {type(error).__name__}: {error}"}
        if asked:
            _, late = await asyncio.wait(asked.values(), timeout=self._timeout_s)
            for request in late:
                request.cancel()
            if late:
                # A cancelled request needs a moment to end; one that does not end is left behind.
                await asyncio.wait(late, timeout=1.0)
        return {name: _answer(request, self._timeout_s) for name, request in asked.items()}


def _answer(request: asyncio.Future[str], timeout_s: float) -> str:
    if not request.done() or request.cancelled():
        return f"did not answer within {timeout_s:g} s"
    error = request.exception()
    return f"could not answer: {type(error).__name__}: {error}" if error is not None else request.result()


_log = logging.getLogger(__name__)

MAX_NAMES = 40


class WaitTracker:
    """Notes of what each loop waits for, and of the last progress."""

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
    board: WaitTracker, timeout_s: float, details: Callable[[], str], clock: Callable[[], float], report: StallReport | None = None
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
