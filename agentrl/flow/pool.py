"""The rollout workers of a run as one: groups go to the least loaded, weights go to all, lost workers are replaced."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from agentrl.core.errors import AgentRLError, ConfigError, EngineDeadError, TransferAbandonedError, WeightsDifferError, WeightSyncError
from agentrl.core.protocols import EngineStats, GroupRef, Membership, Memory, RolloutWorker, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest
from agentrl.flow.publication import Exports, load_together
from agentrl.flow.worker_slots import LOAD_TIMEOUT_S, LeastLoaded, Supervision, WorkerSlot, WorkerState

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 3
"""Transfers of one version that may fail without the loss of a member before all members count as lost."""


class RolloutPool:
    """Routes whole groups, so that the members of a group share one engine's prefix cache.

    Without `supervision` the first loss of a worker is an error. With it, and while `supervise` runs, the groups of a lost worker
    run again on others, from their beginning and under the same seeds, and it is replaced; its successor is given no group before
    it holds the current weights. Workers may then also join and leave; `next_index` is the number of the first that joins.
    """

    def __init__(self, workers: Mapping[str, RolloutWorker], supervision: Supervision | None = None, *, next_index: int = 0) -> None:
        if not workers:
            raise ValueError("a pool needs at least one rollout worker")
        self._slots = {name: WorkerSlot(name, worker) for name, worker in workers.items()}
        self._by_load = LeastLoaded(self._slots.values())
        self._supervision = supervision
        self._supervisor: TaskGroup | None = None  # while `supervise` runs
        self._joining: dict[str, anyio.CancelScope] = {}  # workers that are being started, beside those of the slots
        self._names = (f"engine-{index}" for index in itertools.count(next_index or len(workers)))
        self.update: WeightUpdate | None = None  # the latest publication; `None` before the first
        self._loading = asyncio.Lock()  # weights are loaded by `publish` or into a new worker, never by both at once
        self._changed = anyio.Event()
        self._rerun = 0
        self._published: Callable[[], Awaitable[None]] | None = None
        self._starting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self._serving: Callable[[RolloutWorker], AbstractAsyncContextManager[None]] = lambda worker: nullcontext()
        self.exports: Exports | None = None  # where workers take weights together
        self._group: tuple[int, list[tuple[str, RolloutWorker]]] = (0, [])  # epoch of the latest membership, and its members

    def take_turns(
        self,
        published: Callable[[], Awaitable[None]],
        starting: Callable[[], AbstractAsyncContextManager[None]],
        serving: Callable[[RolloutWorker], AbstractAsyncContextManager[None]],
    ) -> None:
        """Share GPUs: `published` is called when a publication has ended; a worker is started within `starting`, and loads in `serving`."""
        self._published, self._starting, self._serving = published, starting, serving

    def form_groups(self, exports: Exports) -> None:
        """Have workers take weights together, from `exports`."""
        self.exports = exports

    def membership(self) -> Membership:
        """Return the workers that the next publication is for; a change of them since the last call begins another epoch."""
        epoch, before = self._group
        present = [(slot.name, slot.worker) for slot in self._slots.values() if slot.takes_weights]
        if [(name, id(worker)) for name, worker in present] != [(name, id(worker)) for name, worker in before]:
            epoch += 1
        self._group = (epoch, present)
        return Membership(epoch, tuple(name for name, _ in present))

    def next_epoch(self) -> int:
        """Return the number of a membership of other engines; the next publication is for a group that is formed anew."""
        self._group = (self._group[0] + 1, [])
        return self._group[0]

    @property
    def load(self) -> dict[str, int]:
        """Episodes that each worker runs now."""
        return {slot.name: slot.live_episodes for slot in self._slots.values()}

    async def run_group(self, group_request: GroupRequest) -> tuple[GroupSummary, GroupRef]:
        """Run a group on the worker with the fewest live episodes; again on another one if that is lost meanwhile.

        Raises:
            EngineDeadError: If a worker is lost and none can take its place.
        """
        while True:
            slot = await self._least_loaded()
            try:
                answer = await self._run_on(slot, group_request)
            except EngineDeadError as error:
                self._lose(slot, str(error), error)
                answer = None
            if answer is not None:
                return answer
            self._rerun += 1

    async def publish(self, update: WeightUpdate) -> None:
        """Load weights on every worker at once; afterwards all that are given work generate with `update.version`.

        Every worker is waited for, also when one of them fails, so that none is left in the middle of a load.

        Raises:
            EngineDeadError: If no worker is left.
            WeightSyncError: If a worker failed or reports another version, and there is no supervision.
        """
        try:
            async with self._loading:
                self.update = update
                if update.members is not None and self.exports is not None:
                    await self._publish_together(update, self.exports)
                else:
                    slots = [slot for slot in self._slots.values() if slot.ready]
                    answers = await asyncio.gather(*(self._load(update, slot.worker) for slot in slots), return_exceptions=True)
                    self._judge(update, slots, dict(zip((slot.name for slot in slots), answers, strict=True)))
            if self._published is not None:
                await self._published()
            await self._least_loaded()
        finally:
            if self.exports is not None:  # not before a worker holds the weights: until then a new one may need them
                self.exports.ended()

    async def _publish_together(self, update: WeightUpdate, exports: Exports) -> None:
        """Load weights in a group of all members; a group that loses one is formed anew of the others."""
        tries = MAX_TRIES
        while (members := self.membership()).engines and tries:
            slots = [self._slots[name] for name in members.engines]
            if update.members != members:
                update = self.update = await exports.again(update.version, members)
            workers = {slot.name: slot.worker for slot in slots}
            answers = await load_together(workers, partial(self._load, update), exports.abandon_weights)
            given_up = {name for name, answer in answers.items() if isinstance(answer, TransferAbandonedError)}
            tries -= len(given_up) == len(slots)  # because of no member, as far as anybody knows
            if tries:
                answers = {name: answer for name, answer in answers.items() if name not in given_up}
            self._judge(update, [slot for slot in slots if slot.name in answers], answers)
            for slot in slots:
                if answers.get(slot.name) == update.version and slot.state is WorkerState.WAITING:
                    slot.fill(slot.worker)
                    self._by_load.update(slot)
            if not given_up:
                return
            self._group = (self._group[0], [])  # an epoch of its own, also with the same members

    def _judge(self, update: WeightUpdate, slots: list[WorkerSlot], answers: Mapping[str, int | BaseException]) -> None:
        """Set aside the workers that did not take an update."""
        wrong = {name: answer for name, answer in answers.items() if answer != update.version}
        if not wrong:
            return
        if differ := next((answer for answer in wrong.values() if isinstance(answer, WeightsDifferError)), None):
            raise differ  # the same would happen to any engine in its place
        details = "; ".join(f"{name}: {_answer(answer)}" for name, answer in wrong.items())
        cause = next((answer for answer in wrong.values() if isinstance(answer, BaseException)), None)
        error = WeightSyncError(f"weights of version {update.version} are not live on {len(wrong)} of {len(slots)} workers ({details})")
        error.__cause__ = cause
        for slot in slots:
            if slot.name in wrong:
                self._lose(slot, f"weights of version {update.version}: {_answer(wrong[slot.name])}", error)

    async def sleep(self, level: int) -> None:
        """Have every worker's engine give its GPU memory to the learner; one that does not is lost.

        Raises:
            EngineError: If one cannot, and there is no supervision.
        """
        await self._each(lambda worker: worker.sleep(level), "going to sleep")

    async def wake(self, *parts: Memory) -> None:
        """Have every engine that is in use take back parts of its memory; one that does not is lost.

        Raises:
            EngineError: If one cannot, and there is no supervision.
        """
        await self._each(lambda worker: worker.wake(*parts), f"taking back memory ({', '.join(parts)})")

    async def _each(self, call: Callable[[RolloutWorker], Awaitable[None]], what: str) -> None:
        slots = [slot for slot in self._slots.values() if slot.takes_weights]
        answers = await asyncio.gather(*(self._in_time(call(slot.worker)) for slot in slots), return_exceptions=True)
        for slot, answer in zip(slots, answers, strict=True):
            if isinstance(answer, BaseException):
                error = answer if isinstance(answer, AgentRLError) else EngineDeadError(f"{what}: {type(answer).__name__}: {answer}")
                self._lose(slot, f"{what}: {answer}", error)

    async def stats(self) -> dict[str, EngineStats]:
        """Counters of the engines that are in use, by the worker's name."""
        slots = [slot for slot in self._slots.values() if slot.ready]
        answers = await asyncio.gather(*(slot.worker.stats() for slot in slots), return_exceptions=self._supervisor is not None)
        return {slot.name: answer for slot, answer in zip(slots, answers, strict=True) if isinstance(answer, EngineStats)}

    def metrics(self) -> dict[str, float]:
        """Return the state of the workers."""
        return {
            "engine/live": float(sum(slot.ready for slot in self._slots.values())),
            "engine/restarts": float(sum(slot.restarts for slot in self._slots.values())),
            "engine/groups_run_again": float(self._rerun),
        }

    def describe(self) -> str:
        """One line on every worker, for a diagnosis."""
        return "; ".join(
            f"{slot.name}: {slot.state}" + (f" ({slot.reason})" if slot.reason else "") + f", {slot.live_episodes} live episodes"
            for slot in self._slots.values()
        )

    async def supervise(self) -> None:
        """Look after the workers and replace those that are lost.

        Consumes losses. Produces started workers with the current weights. Waits for a loss, for the time of the next look, or for a
        worker to start. Unblocked by `run_group` and `publish`, which notice losses, and by time; runs until cancelled, and returns at
        once without supervision.
        """
        supervision = self._supervision
        if supervision is None:
            return
        try:
            async with anyio.create_task_group() as self._supervisor:
                for slot in self._slots.values():
                    self._supervisor.start_soon(self._keep, slot, supervision, name=f"supervise {slot.name}")
        finally:
            self._supervisor = None

    def scale(self, number: int, *, grows: bool = False) -> str:
        """Let workers join, or the latest of them leave, until there are `number`; returns what happens, in words.

        A worker that joins is given groups once it holds the current weights; the groups of one that leaves run again on others. Workers
        for which there is no room yet wait for it if the cluster `grows` by itself.

        Raises:
            ConfigError: If the workers of this run cannot be replaced, the run does not generate at the moment, or there is no room.
        """
        supervision, supervisor = self._supervision, self._supervisor
        if supervision is None or supervisor is None:
            problem = "the engines of this run cannot join or leave, because it runs in one process"
            if supervision is not None:
                problem = "the run does not generate at the moment"
            raise ConfigError("--num-engines", number, problem, "See docs/cluster.md, machines that leave and join.")
        if self._published is not None:
            raise ConfigError("--num-engines", number, "each engine shares its GPUs with learner ranks (--colocate)", "Start another run.")
        present = [*(name for name, slot in self._slots.items() if slot.state is not WorkerState.GONE), *self._joining]
        more = max(0, number - len(present))
        if more and not grows and (room := supervision.room()) is not None and more > room:
            problem = f"{len(present)} engines are there, and the cluster has room for {room} more"
            remedy = f"Give at most {len(present) + room}, add machines, or --wait-for-machines if the cluster starts them by itself."
            raise ConfigError("--num-engines", number, problem, remedy)
        joining = list(itertools.islice(self._names, more))
        for name in joining:
            scope = self._joining[name] = anyio.CancelScope()
            supervisor.start_soon(self._join, name, scope, supervision, name=f"join {name}")
        leaving = present[number:]
        for name in leaving:
            self._leave(name)
            supervisor.start_soon(supervision.retire, name, name=f"retire {name}")
        change = f"joining: {', '.join(joining)}" if joining else f"leaving: {', '.join(leaving)}" if leaving else "nothing changes"
        return f"engines: {len(present)} to {number}; {change}"

    async def close(self) -> None:
        """Close every worker, then raise the first error if there was one."""
        answers = await asyncio.gather(*(slot.worker.close() for slot in self._slots.values()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _least_loaded(self) -> WorkerSlot:
        """The ready worker with the fewest live episodes; waits for one while lost ones are being replaced."""
        while (slot := self._by_load.first()) is None:
            if all(slot.state is WorkerState.GONE for slot in self._slots.values()):
                raise EngineDeadError(f"no rollout worker is left: {self.describe()}")
            await self._changed.wait()
        return slot

    async def _run_on(self, slot: WorkerSlot, group_request: GroupRequest) -> tuple[GroupSummary, GroupRef] | None:
        """The outcome, or `None` if the worker was set aside meanwhile."""
        slot.live_episodes += group_request.num_episodes
        self._by_load.update(slot)
        group = asyncio.timeout(None)
        slot.groups.add(group)
        try:
            async with group:
                summary, ref = await slot.worker.run_group(group_request)
                return replace(summary, worker=slot.name), ref
        except TimeoutError:
            if not group.expired():
                raise
            return None
        finally:
            slot.groups.discard(group)
            slot.live_episodes -= group_request.num_episodes
            self._by_load.update(slot)

    def _lose(self, slot: WorkerSlot, reason: str, error: AgentRLError) -> None:
        """Give a worker no more work, and have it replaced; without supervision its loss is the caller's error."""
        if self._supervisor is None:
            raise error
        if slot.takes_weights:
            _log.warning("%s is lost: %s", slot.name, reason)
            slot.lose(reason, WorkerState.LOST)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _load(self, update: WeightUpdate, worker: RolloutWorker) -> int:
        return await self._in_time(worker.load_weights(update))

    async def _in_time(self, answer: Awaitable[T]) -> T:
        limit_s = self._supervision.load_timeout_s if self._supervision else LOAD_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise WeightSyncError(f"no answer within {limit_s:g} s") from None

    async def _keep(self, slot: WorkerSlot, supervision: Supervision) -> None:
        while slot.state is not WorkerState.GONE:
            if slot.state is WorkerState.LOST:
                await self._replace(slot, supervision)
                continue
            changed = self._changed
            with anyio.move_on_after(supervision.check_every_s) as look:
                await changed.wait()
            if look.cancelled_caught and slot.ready and (reason := await slot.look(supervision)) is not None:
                self._lose(slot, reason, EngineDeadError(reason))
        if slot.name in self._slots:
            await supervision.retire(slot.name)  # what is left of it holds memory

    async def _join(self, name: str, scope: anyio.CancelScope, supervision: Supervision) -> None:
        """Start one more worker, and look after it."""
        slot = None
        with scope:
            try:
                async with self._starting():
                    worker = await supervision.respawn(name)
                    async with self._loading:
                        slot = WorkerSlot(name, worker)
                        await self._bring_up(slot, worker)
                        self._slots[name] = slot
                        self._by_load.add(slot)
                _log.warning("%s has joined", name)
            except WeightsDifferError:
                raise
            except (AgentRLError, TimeoutError) as error:
                slot = None
                _log.warning("%s could not join: %s: %s", name, type(error).__name__, error)
        if self._joining.pop(name, None) is not None and slot is None:
            await supervision.retire(name)
        self._notify()
        if slot is not None and name in self._slots:
            await self._keep(slot, supervision)

    def _leave(self, name: str) -> None:
        """Give a worker no more work, for good."""
        if (scope := self._joining.pop(name, None)) is not None:
            scope.cancel()
        if (slot := self._slots.pop(name, None)) is not None:
            slot.lose("it left", WorkerState.GONE)
        self._notify()

    async def _bring_up(self, slot: WorkerSlot, worker: RolloutWorker) -> None:
        """Put a new worker into its slot once it holds the current weights, or to wait for the next; `_loading` is held."""
        update = self.update
        if update is None:
            slot.fill(worker)
        elif update.members is None or self.exports is None:
            self._fill(slot, worker, update.version, await self._load(update, worker))
        else:
            members = Membership(self.next_epoch(), (slot.name,))
            async with self._serving(worker), self.exports.alone(update.version, members) as own:
                if own is None:
                    slot.wait(worker)
                else:
                    answers = await load_together({slot.name: worker}, partial(self._load, own), self.exports.abandon_weights)
                    self._fill(slot, worker, update.version, answers[slot.name])

    def _fill(self, slot: WorkerSlot, worker: RolloutWorker, wanted: int, answer: int | BaseException) -> None:
        if isinstance(answer, BaseException):
            raise answer
        if answer != wanted:
            raise WeightSyncError(f"the new worker reports version {answer} instead of {wanted}")
        slot.fill(worker)

    async def _replace(self, slot: WorkerSlot, supervision: Supervision) -> None:
        if slot.restarts and slot.blocked:  # by the same code as before, most likely, so a third worker would not help
            slot.lose(slot.reason, WorkerState.GONE)
        elif slot.restarts >= supervision.max_restarts:
            slot.reason = f"{slot.reason}; it was replaced {slot.restarts} times (--max-engine-restarts)"
            slot.lose(slot.reason, WorkerState.GONE)
        else:
            slot.restarts += 1
            try:
                async with self._starting():
                    worker = await supervision.respawn(slot.name)
                    async with self._loading:
                        await self._bring_up(slot, worker)
                        self._by_load.update(slot)
                _log.warning("%s works again", slot.name)
            except WeightsDifferError:
                raise
            except (AgentRLError, TimeoutError) as error:
                slot.reason = f"{type(error).__name__}: {error}"
                _log.warning("%s could not be replaced: %s", slot.name, slot.reason)
        self._notify()


def _answer(answer: int | BaseException) -> str:
    return f"{type(answer).__name__}: {answer}" if isinstance(answer, BaseException) else f"reports version {answer}"
