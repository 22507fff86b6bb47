"""The rollout workers of a run as one: groups go to the least loaded, weights go to all, lost workers are replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import anyio

from agentrl.core.errors import AgentRLError, EngineDeadError, WeightSyncError
from agentrl.core.protocols import EngineStats, GroupRef, RolloutWorker, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Ticket
from agentrl.rollout.balance import LeastLoaded
from agentrl.rollout.seat import Seat, Standing, Supervision

_log = logging.getLogger(__name__)


class RolloutPool:
    """Routes whole groups, so that the members of a group share one engine's prefix cache.

    Without `supervision` the first loss of a worker is an error. With it, and while `supervise` runs, the groups of a lost worker
    run again on others, from their beginning and under the same seeds, and it is replaced; its successor is given no group before
    it holds the current weights.

    Args:
        workers: Name -> started worker; ties in load go to the first.
        supervision: How lost workers are replaced.

    Raises:
        ValueError: If there is no worker.
    """

    def __init__(self, workers: Mapping[str, RolloutWorker], supervision: Supervision | None = None) -> None:
        if not workers:
            raise ValueError("a pool needs at least one rollout worker")
        self._seats = {name: Seat(name, worker) for name, worker in workers.items()}
        self._by_load = LeastLoaded(self._seats.values())
        self._supervision = supervision
        self._supervised = False
        self._update: WeightUpdate | None = None
        self._loading = asyncio.Lock()  # weights are loaded by `publish` or into a new worker, never by both at once
        self._changed = anyio.Event()
        self._rerun = 0

    @property
    def load(self) -> dict[str, int]:
        """Episodes that each worker runs now."""
        return {seat.name: seat.live_episodes for seat in self._seats.values()}

    async def run_group(self, ticket: Ticket) -> tuple[GroupSummary, GroupRef]:
        """Run a group on the worker with the fewest live episodes; again on another one if that is lost meanwhile.

        Raises:
            EngineDeadError: If a worker is lost and none can take its place.
        """
        while True:
            seat = await self._least_loaded()
            try:
                answer = await self._run_on(seat, ticket)
            except EngineDeadError as error:
                self._lose(seat, str(error), error)
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
        async with self._loading:
            self._update = update
            seats = [seat for seat in self._seats.values() if seat.ready]
            answers = await asyncio.gather(*(self._load(seat.worker, update) for seat in seats), return_exceptions=True)
        wrong = {seat.name: answer for seat, answer in zip(seats, answers, strict=True) if answer != update.version}
        if not wrong:
            await self._least_loaded()
            return
        details = "; ".join(f"{name}: {_answer(answer)}" for name, answer in wrong.items())
        cause = next((answer for answer in wrong.values() if isinstance(answer, BaseException)), None)
        error = WeightSyncError(f"weights of version {update.version} are not live on {len(wrong)} of {len(seats)} workers ({details})")
        error.__cause__ = cause
        for name in wrong:
            self._lose(self._seats[name], f"weights of version {update.version}: {_answer(wrong[name])}", error)
        await self._least_loaded()

    async def stats(self) -> dict[str, EngineStats]:
        """Counters of the engines that are in use, by the worker's name."""
        seats = [seat for seat in self._seats.values() if seat.ready]
        answers = await asyncio.gather(*(seat.worker.stats() for seat in seats), return_exceptions=self._supervised)
        return {seat.name: answer for seat, answer in zip(seats, answers, strict=True) if isinstance(answer, EngineStats)}

    def metrics(self) -> dict[str, float]:
        """How the workers fare."""
        return {
            "engine/live": float(sum(seat.ready for seat in self._seats.values())),
            "engine/restarts": float(sum(seat.restarts for seat in self._seats.values())),
            "engine/groups_run_again": float(self._rerun),
        }

    def describe(self) -> str:
        """One line on every worker, for a diagnosis."""
        return "; ".join(
            f"{seat.name}: {seat.standing}" + (f" ({seat.reason})" if seat.reason else "") + f", {seat.live_episodes} live episodes"
            for seat in self._seats.values()
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
        self._supervised = True
        try:
            async with anyio.create_task_group() as tasks:
                for seat in self._seats.values():
                    tasks.start_soon(self._keep, seat, supervision, name=f"supervise {seat.name}")
        finally:
            self._supervised = False

    async def close(self) -> None:
        """Close every worker, then raise the first error if there was one."""
        answers = await asyncio.gather(*(seat.worker.close() for seat in self._seats.values()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _least_loaded(self) -> Seat:
        """The ready worker with the fewest live episodes; waits for one while lost ones are being replaced."""
        while (seat := self._by_load.first()) is None:
            if all(seat.standing is Standing.GONE for seat in self._seats.values()):
                raise EngineDeadError(f"no rollout worker is left: {self.describe()}")
            await self._changed.wait()
        return seat

    async def _run_on(self, seat: Seat, ticket: Ticket) -> tuple[GroupSummary, GroupRef] | None:
        """The outcome, or `None` if the worker was set aside meanwhile."""
        seat.live_episodes += ticket.num_samples
        self._by_load.update(seat)
        scope = anyio.CancelScope()
        seat.scopes.add(scope)
        try:
            with scope:
                return await seat.worker.run_group(ticket)
        finally:
            seat.scopes.discard(scope)
            seat.live_episodes -= ticket.num_samples
            self._by_load.update(seat)
        return None

    def _lose(self, seat: Seat, reason: str, error: AgentRLError) -> None:
        """Give a worker no more work, and have it replaced; without supervision its loss is the caller's error."""
        if not self._supervised:
            raise error
        if seat.ready:
            _log.warning("%s is lost: %s", seat.name, reason)
            seat.lose(reason, Standing.LOST)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _load(self, worker: RolloutWorker, update: WeightUpdate) -> int:
        async with asyncio.timeout(self._supervision.load_timeout_s if self._supervision else None):
            return await worker.load_weights(update)

    async def _keep(self, seat: Seat, supervision: Supervision) -> None:
        while seat.standing is not Standing.GONE:
            if not seat.ready:
                await self._replace(seat, supervision)
                continue
            changed = self._changed
            with anyio.move_on_after(supervision.check_every_s) as look:
                await changed.wait()
            if look.cancelled_caught and seat.ready and (reason := await seat.look(supervision)) is not None:
                self._lose(seat, reason, EngineDeadError(reason))

    async def _replace(self, seat: Seat, supervision: Supervision) -> None:
        if seat.restarts >= supervision.max_restarts:
            seat.reason = f"{seat.reason}; it was replaced {seat.restarts} times (--max-engine-restarts)"
            seat.lose(seat.reason, Standing.GONE)
        else:
            seat.restarts += 1
            try:
                worker = await supervision.respawn(seat.name)
                async with self._loading:
                    if self._update is not None and (version := await self._load(worker, self._update)) != self._update.version:
                        raise WeightSyncError(f"the new worker reports version {version} instead of {self._update.version}")
                    seat.fill(worker)
                    self._by_load.update(seat)
                _log.warning("%s works again", seat.name)
            except (AgentRLError, TimeoutError) as error:
                seat.reason = f"{type(error).__name__}: {error}"
                _log.warning("%s could not be replaced: %s", seat.name, seat.reason)
        self._notify()


def _answer(answer: int | BaseException) -> str:
    return f"{type(answer).__name__}: {answer}" if isinstance(answer, BaseException) else f"reports version {answer}"
