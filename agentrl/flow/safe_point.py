"""The moment between two steps at which a run's model can be looked at: the learner is idle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import anyio


class Reached:
    """A number that only grows and can be waited for.

    Args:
        value: Where it begins.
    """

    def __init__(self, value: int) -> None:
        self.value = value
        self._more = anyio.Event()

    def advance(self, value: int) -> None:
        """Let it grow, and wake who waits."""
        self.value = max(self.value, value)
        self._more.set()
        self._more = anyio.Event()

    async def until(self, value: int) -> None:
        """Wait until it is at least `value`."""
        while self.value < value:
            await self._more.wait()


@dataclass(frozen=True, slots=True)
class SafePoint:
    """What a hook between two steps may rely on: while it runs, the learner holds the weights of `step` and does not train.

    Attributes:
        step: Steps done.
        until_live: Waits until these weights are those of every worker; they stay so until the hook returns.
        progress: To be called now and then by a hook that takes long, so that the run is not thought to hang.
    """

    step: int
    until_live: Callable[[], Awaitable[None]]
    progress: Callable[[], None]


AfterStep: TypeAlias = Callable[[SafePoint], Awaitable[Mapping[str, float] | None]]
"""A hook between two steps; what it returns is added to the metrics of the step."""
