"""Ending a run early and in order: no group more is started, the step under way is finished, and where it stood is saved."""

from __future__ import annotations

import anyio

from agentrl.flow.state import RunState


class StopRequest:
    """Asks the run it is given to for an early end; made before the run, from the same event loop's thread.

    Attributes:
        heard: Whether a run listens now. If none does, nothing happens after `ask` until one begins.
    """

    def __init__(self) -> None:
        self.heard = False
        self._asked = anyio.Event()

    def ask(self) -> None:
        """Ask; safe to call twice."""
        self._asked.set()

    async def wait(self) -> None:
        """Until somebody asks."""
        await self._asked.wait()


async def stop_when_asked(run: RunState, request: StopRequest) -> None:
    """End the loops early.

    Consumes the request. Produces an ended queue, cancelled groups and hooks; `train` then saves and ends the
    others. Waits for somebody to ask. Unblocked by a signal; cancelled when the loops have ended.
    """
    request.heard = True
    try:
        await request.wait()
        run.stop()
    finally:
        request.heard = False
