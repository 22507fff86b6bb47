"""Turns on GPUs that engines and learner share: one of the two computes, and the other keeps its state in CPU memory meanwhile.

    engines generate | sleep -> reload -> train -> offload optimizer -> wake weights -> export, load -> offload weights -> wake cache | ...

Without ``--colocate`` there are no turns, and `TimeSharedLearner` is not used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from agentrl.core.protocols import GroupRef, Learner, Membership, RolloutWorker, TrainResult, WeightUpdate
from agentrl.flow.guarded import GuardedLearner
from agentrl.flow.pool import RolloutPool

KEPT = 1
"""Sleep level with which engines keep their weights in CPU memory; used wherever no publication to all of them follows."""


class TimeSharedLearner(GuardedLearner):
    """A learner that puts the engines to sleep before it computes, and wakes them after it; see `agentrl.core.protocols.Learner`.

    It begins with the learner's state in CPU memory and the engines awake. A step takes the turn, which ends when the publication of
    its weights has ended on all engines, whether or not all of them took the weights. A checkpoint or a saved model takes a turn
    of its own: requests under way stay in the engines. An engine that is started takes a turn too, because its GPU has to have room.
    """

    def __init__(self, learner: Learner, pool: RolloutPool, *, sleep_level: int) -> None:
        super().__init__(learner)
        self._pool, self._sleep_level = pool, sleep_level
        self._turn = anyio.Semaphore(1)  # held while the learner's state is on the GPUs, and while an engine is started
        self._held = False  # by the learner
        pool.take_turns(self.ended, self.starting, self.serving)

    async def start(self) -> None:
        """As `Learner.start`; its state is in CPU memory afterwards."""
        await self._learner.start()
        await self._learner.offload(keep_weights=False)

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """Take the turn and train; the turn goes on until the weights are published."""
        await self._begin(self._sleep_level)
        return await self._learner.train(step, groups)

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """Make room for the weights of the engines, wake these, and export."""
        if not self._held:  # a resumed run publishes before its first step
            await self._begin(KEPT)
        # The KV cache wakes in `ended`: until all engines have taken the weights, the learner's are on the GPUs too.
        await self._learner.offload(keep_weights=True)
        await self._pool.wake("weights")
        return await self._learner.export_weights(version, members)

    async def ended(self) -> None:
        """Give the GPUs to the engines, if the learner has them; called by the pool when a publication has ended."""
        if not self._held:
            return
        await self._learner.offload(keep_weights=False)
        await self._pool.wake("weights", "kv_cache")
        self._held = False
        self._turn.release()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Keep the learner off the GPUs while an engine is started on one of them."""
        async with self._turn:
            yield

    @asynccontextmanager
    async def serving(self, worker: RolloutWorker) -> AsyncIterator[None]:
        """Have the learner's weights on the GPUs for a new engine, which loads them within the block; only within `starting`."""
        await self._pool.sleep(KEPT)
        # The pool does not reach this worker: it is in no slot that is in use yet.
        await worker.sleep(KEPT)
        await self._learner.reload()
        await self._learner.offload(keep_weights=True)
        await worker.wake("weights")
        try:
            yield
        finally:
            await self._learner.offload(keep_weights=False)
            # A worker that took the weights is in its slot by now, so that the pool wakes it with the others.
            await self._pool.wake("weights", "kv_cache")

    @asynccontextmanager
    async def undisturbed(self) -> AsyncIterator[None]:
        """Take a turn for one call alone, after which the engines go on with the weights that they have."""
        await self._begin(KEPT)
        try:
            yield
        finally:
            await self.ended()

    async def _begin(self, level: int) -> None:
        """Wait for the publication or the start of an engine under way, and take the GPUs."""
        await self._turn.acquire()
        try:
            await self._pool.sleep(level)
            await self._learner.reload()
        except BaseException:
            self._turn.release()
            raise
        self._held = True
