"""Loading of weights by engines that take them together: one that fails keeps none of the others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agentrl.core.protocols import Membership, RolloutWorker, WeightUpdate


class Exports(Protocol):
    """Gives out weights of the learner to the members of a group."""

    async def again(self, version: int, members: Membership) -> WeightUpdate:
        """Send again in the publication that is under way, to other members."""
        ...

    def alone(self, version: int, members: Membership) -> AbstractAsyncContextManager[WeightUpdate | None]:
        """Send outside a publication, within the block; `None` if the learner is beyond `version` already, and publishes soon."""
        ...

    async def abandon_weights(self, reason: str) -> None:
        """Give up the transfer that is under way."""

    def ended(self) -> None:
        """Note that a publication has ended."""


async def load_together(
    workers: Mapping[str, RolloutWorker], load: Callable[[RolloutWorker], Awaitable[int]], abandon: Callable[[str], Awaitable[None]]
) -> dict[str, int | BaseException]:
    """Have all members load at once; returns the version that each reports, or its error.

    As soon as one fails the transfer is abandoned, because the others would wait for it; then they are waited for.
    """
    loads = {name: asyncio.ensure_future(load(worker)) for name, worker in workers.items()}
    try:
        await asyncio.wait(loads.values(), return_when=asyncio.FIRST_EXCEPTION)
        failed = [f"{name}: {error}" for name, task in loads.items() if task.done() and (error := task.exception()) is not None]
        if failed:
            await abandon(failed[0])
        answers = await asyncio.gather(*loads.values(), return_exceptions=True)
    finally:
        # `asyncio.wait` leaves its tasks running when the call that waits is cancelled.
        for task in loads.values():
            task.cancel()
    return dict(zip(loads, answers, strict=True))
