"""Exports of weights to engines that take them together: to whom, of which version, and never while the learner does something else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from agentrl.core.manifest import FileEntry
from agentrl.core.protocols import GroupRef, Learner, Membership, TrainResult, WeightUpdate
from agentrl.rollout.pool import RolloutPool

T = TypeVar("T")


class JointLearner:
    """A learner whose weights go to all engines of the pool at once; see `agentrl.core.protocols.Learner`.

    From an export until the pool says that its publication has ended, the learner does nothing else: the weights are read all that
    time, and may have to be sent again, to other members. The pool asks for weights by itself when an engine was replaced.
    """

    def __init__(self, learner: Learner, pool: RolloutPool, *, version: int) -> None:
        self._learner, self._pool, self._version = learner, pool, version
        self._busy = anyio.Lock()
        self._ended = anyio.Event()
        self._ended.set()
        pool.form_groups(self)

    async def start(self) -> None:
        """As `Learner.start`."""
        await self._learner.start()

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """As `Learner.train`, after the publication that is under way."""
        async with self._undisturbed():
            result = await self._learner.train(step, groups)
            self._version = step + 1
            return result

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """Begin a publication: send to all engines of the pool."""
        async with self._undisturbed():
            self._ended = anyio.Event()
            self._version = version
            return await self._learner.export_weights(version, members or self._pool.membership())

    async def again(self, version: int, members: Membership) -> WeightUpdate:
        """Send again in the publication that is under way, to other members."""
        return await self._learner.export_weights(version, members)

    @asynccontextmanager
    async def alone(self, version: int, members: Membership) -> AsyncIterator[WeightUpdate | None]:
        """Send outside a publication, within the block; `None` if the learner is beyond `version` already, and publishes soon."""
        async with self._busy:
            yield await self._learner.export_weights(version, members) if version == self._version else None

    def ended(self) -> None:
        """Note the end of a publication; called by the pool."""
        self._ended.set()

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
        """As `Learner.save_model`, after the publication that is under way."""
        async with self._undisturbed():
            await self._learner.save_model(path)

    async def save_checkpoint(self, path: str, step: int) -> None:
        """As `Learner.save_checkpoint`, after the publication that is under way."""
        async with self._undisturbed():
            await self._learner.save_checkpoint(path, step)

    async def seal_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        """As `Learner.seal_checkpoint`, whatever is under way."""
        return await self._learner.seal_checkpoint(path)

    async def share_out(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """As `Learner.share_out`, whatever is under way."""
        return await self._learner.share_out(work, files, *arguments)

    async def load_checkpoint(self, path: str) -> int:
        """As `Learner.load_checkpoint`."""
        async with self._undisturbed():
            return await self._learner.load_checkpoint(path)

    async def close(self) -> None:
        """As `Learner.close`."""
        await self._learner.close()

    @asynccontextmanager
    async def _undisturbed(self) -> AsyncIterator[None]:
        await self._ended.wait()
        async with self._busy:
            yield
