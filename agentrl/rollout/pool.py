"""The rollout workers of a run as one: groups go to the least loaded, weights go to all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.core.errors import WeightSyncError
from agentrl.core.protocols import EngineStats, GroupRef, RolloutWorker, WeightUpdate
from agentrl.core.types import GroupSummary, Ticket


@dataclass(slots=True)
class _Seat:
    name: str
    worker: RolloutWorker
    live_episodes: int = 0


class RolloutPool:
    """Routes whole groups, so that the members of a group share one engine's prefix cache.

    Args:
        workers: Name -> started worker; ties in load go to the first.

    Raises:
        ValueError: If there is no worker.
    """

    def __init__(self, workers: Mapping[str, RolloutWorker]) -> None:
        if not workers:
            raise ValueError("a pool needs at least one rollout worker")
        self._seats = {name: _Seat(name, worker) for name, worker in workers.items()}

    @property
    def load(self) -> dict[str, int]:
        """Episodes that each worker runs now."""
        return {seat.name: seat.live_episodes for seat in self._seats.values()}

    async def run_group(self, ticket: Ticket) -> tuple[GroupSummary, GroupRef]:
        """Run a group on the worker with the fewest live episodes."""
        seat = min(self._seats.values(), key=lambda seat: seat.live_episodes)
        seat.live_episodes += ticket.num_samples
        try:
            return await seat.worker.run_group(ticket)
        finally:
            seat.live_episodes -= ticket.num_samples

    async def publish(self, update: WeightUpdate) -> None:
        """Load weights on every worker at once; afterwards all of them generate with `update.version`.

        Every worker is waited for, also when one of them fails, so that none is left in the middle of a load.

        Raises:
            WeightSyncError: If a worker failed or reports another version.
        """
        seats = list(self._seats.values())
        answers = await asyncio.gather(*(seat.worker.load_weights(update) for seat in seats), return_exceptions=True)
        wrong = {seat.name: answer for seat, answer in zip(seats, answers, strict=True) if answer != update.version}
        if wrong:
            details = "; ".join(f"{name}: {_answer(answer)}" for name, answer in wrong.items())
            cause = next((answer for answer in wrong.values() if isinstance(answer, BaseException)), None)
            raise WeightSyncError(
                f"weights of version {update.version} are not live on {len(wrong)} of {len(seats)} workers ({details})"
            ) from cause

    async def stats(self) -> dict[str, EngineStats]:
        """Counters of every worker's engine by the worker's name."""
        names = list(self._seats)
        return dict(zip(names, await asyncio.gather(*(self._seats[name].worker.stats() for name in names)), strict=True))

    async def close(self) -> None:
        """Close every worker, then raise the first error if there was one."""
        answers = await asyncio.gather(*(seat.worker.close() for seat in self._seats.values()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer


def _answer(answer: int | BaseException) -> str:
    return f"{type(answer).__name__}: {answer}" if isinstance(answer, BaseException) else f"reports version {answer}"
