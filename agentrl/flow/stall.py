"""What is written down when a run stalls: who waits for what, and the stacks of every process that still answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Protocol

from agentrl.core.stacks import describe_process

ANSWER_TIMEOUT_S = 5.0


class Diagnose(Protocol):
    """Asks the other processes of a run what they are doing."""

    def __call__(self) -> Mapping[str, Awaitable[str]]:
        """One request per process, by its name; each may fail, and need not answer."""
        ...


def nobody_else() -> Mapping[str, Awaitable[str]]:
    """The `Diagnose` of a run in a single process."""
    return {}


class StallReport:
    """Writes RUN_DIR/stall-<time>.txt.

    Args:
        run_dir: Directory of the run.
        diagnose: Asks the other processes.
        answer_timeout_s: Seconds that they have to answer.
    """

    def __init__(self, run_dir: Path, diagnose: Diagnose = nobody_else, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._run_dir, self._diagnose, self._timeout_s = run_dir, diagnose, answer_timeout_s

    async def write(self, summary: str) -> str:
        """Write the report.

        Args:
            summary: What is known already.

        Returns:
            A sentence that says where it is, or why it is not there; never raises.
        """
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
                await asyncio.wait(late, timeout=1.0)
        return {name: _answer(request, self._timeout_s) for name, request in asked.items()}


def _answer(request: asyncio.Future[str], timeout_s: float) -> str:
    if not request.done() or request.cancelled():
        return f"did not answer within {timeout_s:g} s"
    error = request.exception()
    return f"could not answer: {type(error).__name__}: {error}" if error is not None else request.result()
