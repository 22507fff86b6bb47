"""The handle of all learner ranks, which are actors of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from agentrl.cluster.ray_actors import unwrapped
from agentrl.core.errors import AgentRLError, CheckpointError, LearnerDeadError
from agentrl.core.manifest import FileEntry, shares
from agentrl.core.protocols import GroupRef, Membership, TrainResult, WeightUpdate

T = TypeVar("T")

LOSS_TIMEOUT_S = 30.0
"""Seconds in which Ray tells of a lost machine after a rank on another one has noticed."""


class RayLearner:
    """A `Learner` whose ranks are actors; a call goes to all of them, rank 0 answers."""

    def __init__(self, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        self.actors, self._nodes = actors, nodes  # `nodes` has the address of each rank's machine; those of one follow one another

    def diagnose(self) -> dict[str, Awaitable[str]]:
        """Return the stacks of each rank, by its name."""
        return {f"learner-{rank}": _learner(actor.diagnose.remote()) for rank, actor in enumerate(self.actors)}

    async def start(self) -> None:
        """As `Learner.start`."""
        host, port = await _learner(self.actors[0].address.remote())
        places = [(self._nodes[:rank].count(node), self._nodes.count(node)) for rank, node in enumerate(self._nodes)]
        starts = [
            actor.call.remote("start", rank, len(self.actors), port, host, place)
            for rank, (actor, place) in enumerate(zip(self.actors, places, strict=True))
        ]
        await asyncio.gather(*(self._rank(rank, start) for rank, start in enumerate(starts)))

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """As `Learner.train`; references are resolved by the ranks, not here."""
        result: TrainResult = await self._all("train", step, *groups)
        return result

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """As `Learner.export_weights`."""
        return merged(await self._every("export_weights", version, members))

    async def abandon_weights(self, reason: str) -> None:
        """As `Learner.abandon_weights`."""
        await self._all("abandon_weights", reason)

    async def offload(self, *, keep_weights: bool) -> None:
        """As `Learner.offload`."""
        await self._all("offload", keep_weights)

    async def reload(self) -> None:
        """As `Learner.reload`."""
        await self._all("reload")

    async def save_model(self, path: str) -> None:
        """As `Learner.save_model`."""
        await self._all("save_model", path)

    async def save_checkpoint(self, path: str, step: int) -> None:
        """As `Learner.save_checkpoint`."""
        await self._all("save_checkpoint", path, step)

    async def seal_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        """As `Learner.seal_checkpoint`; an entry says which rank wrote the file."""
        answers = await asyncio.gather(*(_learner(actor.seal_checkpoint.remote(path)) for actor in self.actors))
        return {name: {**entry, "rank": rank} for rank, entries in enumerate(answers) for name, entry in entries.items()}

    async def map_files(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """As `Learner.map_files`: a rank is given what it wrote, or as many bytes as the others."""
        parts = zip(self.actors, shares(files, len(self.actors)), strict=True)
        return list(await asyncio.gather(*(_learner(actor.with_files.remote(work, part, *arguments)) for actor, part in parts if part)))

    async def load_checkpoint(self, path: str) -> int:
        """As `Learner.load_checkpoint`."""
        return int(await self._all("load_checkpoint", path))

    async def close(self) -> None:
        """As `Learner.close`."""
        await self._all("close")

    async def _all(self, method: str, *arguments: Any) -> Any:
        """Call a method of every rank; returns the answer of rank 0."""
        answer, *_ = await self._every(method, *arguments)
        return answer

    async def _every(self, method: str, *arguments: Any) -> list[Any]:
        calls = [asyncio.ensure_future(self._rank(rank, actor.call.remote(method, *arguments))) for rank, actor in enumerate(self.actors)]
        try:
            return await asyncio.gather(*calls)
        except Exception as error:  # of a rank that misses another one, most likely, and it says so sooner than Ray
            if isinstance(error, AgentRLError) and not isinstance(error, CheckpointError):  # that is how a save says so
                raise
            await asyncio.wait(calls, timeout=LOSS_TIMEOUT_S)
            for call in calls:
                if call.done() and isinstance(lost := call.exception(), LearnerDeadError):
                    raise lost from None
            raise
        finally:
            for call in calls:
                call.cancel()

    async def _rank(self, rank: int, ref: Awaitable[T]) -> T:
        return await unwrapped(ref, LearnerDeadError, f"learner-{rank} on {self._nodes[rank]}")


def merged(updates: Sequence[WeightUpdate | None]) -> WeightUpdate:
    """Return the update of rank 0 with the meeting points of all ranks."""
    first = next(update for update in updates if update is not None)
    if "connect" not in first.payload:
        return first
    places = {rank: place for update in updates if update is not None for rank, place in update.payload["connect"]["places"].items()}
    return replace(first, payload={**first.payload, "connect": {**first.payload["connect"], "places": places}})


async def _learner(ref: Awaitable[T]) -> T:
    return await unwrapped(ref, LearnerDeadError, "a learner rank")
