"""Exports of weights to engines that take them together: to whom, of which version, and never while the learner does something else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from agentrl.core.protocols import GroupRef, Learner, Membership, TrainResult, WeightUpdate
from agentrl.flow.guarded import GuardedLearner
from agentrl.flow.pool import RolloutPool


class JointLearner(GuardedLearner):
    """A learner whose weights go to all engines of the pool at once; see `agentrl.core.protocols.Learner`.

    From an export until the pool says that its publication has ended, the learner does nothing else: the weights are read all that
    time, and may have to be sent again, to other members. The pool asks for weights by itself when an engine was replaced.
    """

    def __init__(self, learner: Learner, pool: RolloutPool, *, version: int) -> None:
        super().__init__(learner)
        self._pool, self._version = pool, version
        self._busy = anyio.Lock()
        self._ended = anyio.Event()
        self._ended.set()
        pool.form_groups(self)

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """As `Learner.train`, after the publication that is under way."""
        async with self.undisturbed():
            result = await self._learner.train(step, groups)
            self._version = step + 1
            return result

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """Begin a publication: send to all engines of the pool."""
        async with self.undisturbed():
            self._ended = anyio.Event()
            self._version = version
            return await self._learner.export_weights(version, members or self._pool.membership())

    async def again(self, version: int, members: Membership) -> WeightUpdate:
        """Send again in the publication that is under way, to other members."""
        # Without `undisturbed`, which would wait for the end of the very publication that asks.
        return await self._learner.export_weights(version, members)

    @asynccontextmanager
    async def alone(self, version: int, members: Membership) -> AsyncIterator[WeightUpdate | None]:
        """Send outside a publication, within the block; `None` if the learner is beyond `version` already, and publishes soon."""
        async with self._busy:
            yield await self._learner.export_weights(version, members) if version == self._version else None

    def ended(self) -> None:
        """Note the end of a publication; called by the pool."""
        self._ended.set()

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Wait for the end of the publication that is under way."""
        # In this order: before a publication ends, a new engine may take weights through `alone`, which needs the lock.
        await self._ended.wait()
        async with self._busy:
            yield
