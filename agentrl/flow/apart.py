"""Engines apart from those that generate for training: they hold the weights of one step for as long as they are asked to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from agentrl.core.errors import EngineDeadError, WeightSyncError
from agentrl.core.protocols import Membership, RolloutWorker, WeightUpdate
from agentrl.flow.pool import RolloutPool
from agentrl.flow.publication import load_together
from agentrl.flow.worker_slots import Supervision, WorkerSlot, WorkerState


class ApartPool(RolloutPool):
    """Rollout workers that take weights from `trained`, the pool of the run, when they are asked to, and at no other time.

    A lost one is started again, as in any pool. Where weights come as files its successor takes those of the version before; where all
    engines take them together, the learner holds others by then, and it waits for the next version.
    """

    def __init__(self, workers: Mapping[str, RolloutWorker], trained: RolloutPool, supervision: Supervision | None = None) -> None:
        super().__init__(workers, supervision)
        self._trained = trained

    @property
    def gone(self) -> bool:
        """True if every worker was given up."""
        return all(slot.state is WorkerState.GONE for slot in self._slots.values())

    @property
    def takes_together(self) -> bool:
        """True if the learner has to hold the weights until these workers have taken them."""
        return self._trained.exports is not None

    def current(self, version: int) -> WeightUpdate | None:
        """Return how the workers of the run got the weights of `version`, which they hold; `None` if they began with them.

        Raises:
            WeightSyncError: If they hold others.
        """
        update = self._trained.update
        if (update.version if update else 0) != version:
            raise WeightSyncError(f"version {version} was to be taken, and the engines hold version {update.version if update else 0}")
        return update

    async def take(self, update: WeightUpdate | None) -> None:
        """Have all workers load what `current` returned; afterwards each that is given work generates with that version.

        Raises:
            EngineDeadError: If no worker is left.
            WeightSyncError: If a worker failed, and there is no supervision.
        """
        if update is None:
            return
        if update.members is None or self._trained.exports is None:
            # Without the lock, which `publish` takes itself.
            await self.publish(update)
            return
        async with self._loading:
            await self._take_together(update)
        await self._least_loaded()

    async def _take_together(self, update: WeightUpdate) -> None:
        """Form a group of the learner and these workers alone; the other engines form theirs anew at the next publication."""
        exports, slots = self._trained.exports, [slot for slot in self._slots.values() if slot.takes_weights]
        self.update = update
        if exports is None or not slots:
            return
        members = Membership(self._trained.next_epoch(), tuple(slot.name for slot in slots))
        async with exports.alone(update.version, members) as own:
            if own is None:
                raise WeightSyncError(f"the learner no longer holds version {update.version}")
            workers = {slot.name: slot.worker for slot in slots}
            answers = await load_together(workers, partial(self._load, own), exports.abandon_weights)
        self._judge(update, slots, answers)
        for slot in slots:
            if answers[slot.name] == update.version and slot.state is WorkerState.WAITING:
                slot.fill(slot.worker)
                self._by_load.update(slot)

    async def _bring_up(self, slot: WorkerSlot, worker: RolloutWorker) -> None:
        if self.update is not None and self.update.members is not None:
            slot.wait(worker)
        else:
            await super()._bring_up(slot, worker)

    async def _least_loaded(self) -> WorkerSlot:
        while (slot := self._by_load.first()) is None:
            if all(slot.state in (WorkerState.GONE, WorkerState.WAITING) for slot in self._slots.values()):
                raise EngineDeadError(f"no engine for evaluations holds the weights: {self.describe()}")
            await self._changed.wait()
        return slot
