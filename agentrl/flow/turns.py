"""Turns on GPUs that engines and learner share: one of the two computes, and the other keeps its state in CPU memory meanwhile.

    engines generate | sleep -> reload -> train -> offload optimizer -> wake weights -> export, load -> offload weights -> wake cache | ...

Without ``--colocate`` there are no turns, and `TurnTakingLearner` is not used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from agentrl.core.manifest import FileEntry
from agentrl.core.protocols import GroupRef, Learner, Membership, RolloutWorker, TrainResult, WeightUpdate
from agentrl.rollout.pool import RolloutPool

T = TypeVar("T")

KEPT = 1
"""Sleep level with which engines keep their weights in CPU memory; used wherever no publication to all of them follows."""


class TurnTakingLearner:
    """A learner that puts the engines to sleep before it computes, and wakes them after it; see `agentrl.core.protocols.Learner`.

    It begins with the learner's state in CPU memory and the engines awake. A step takes the turn, which ends when the publication of
    its weights has ended on all engines, whether or not all of them took the weights. A checkpoint or a saved model takes a turn
    of its own: requests under way stay in the engines. An engine that is started takes a turn too, because its GPU has to have room.
    """

    def __init__(self, learner: Learner, pool: RolloutPool, *, sleep_level: int) -> None:
        self._learner, self._pool, self._sleep_level = learner, pool, sleep_level
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
        await self._learner.offload(keep_weights=True)
        await self._pool.wake("weights")
        return await self._learner.export_weights(version, members)

    async def abandon_weights(self, reason: str) -> None:
        """As `Learner.abandon_weights`."""
        await self._learner.abandon_weights(reason)

    async def offload(self, *, keep_weights: bool) -> None:
        """As `Learner.offload`."""
        await self._learner.offload(keep_weights=keep_weights)

    async def reload(self) -> None:
        """As `Learner.reload`."""
        await self._learner.reload()

    async def save_model(self, path: str) -> None:
        """Take a turn and save."""
        async with self._own_turn():
            await self._learner.save_model(path)

    async def save_checkpoint(self, path: str, step: int) -> None:
        """Take a turn and save."""
        async with self._own_turn():
            await self._learner.save_checkpoint(path, step)

    async def seal_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        """As `Learner.seal_checkpoint`, whoever's turn it is."""
        return await self._learner.seal_checkpoint(path)

    async def share_out(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """As `Learner.share_out`, whoever's turn it is."""
        return await self._learner.share_out(work, files, *arguments)

    async def load_checkpoint(self, path: str) -> int:
        """Take a turn and load."""
        async with self._own_turn():
            return await self._learner.load_checkpoint(path)

    async def close(self) -> None:
        """As `Learner.close`, whoever's turn it is."""
        await self._learner.close()

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
        await worker.sleep(KEPT)
        await self._learner.reload()
        await self._learner.offload(keep_weights=True)
        await worker.wake("weights")
        try:
            yield
        finally:
            await self._learner.offload(keep_weights=False)
            await self._pool.wake("weights", "kv_cache")

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        await self._begin(KEPT)
        yield
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
