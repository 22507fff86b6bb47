"""A learner in front of another one, which decides when the other may be asked for what needs it undisturbed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from agentrl.core.manifest import FileEntry
from agentrl.core.protocols import GroupRef, Learner, Membership, TrainResult, WeightUpdate

T = TypeVar("T")


class GuardedLearner(ABC):
    """A learner that passes every call on; see `agentrl.core.protocols.Learner`.

    Training, saving and loading run within `undisturbed`; everything else goes on at once.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    @abstractmethod
    def undisturbed(self) -> AbstractAsyncContextManager[None]:
        """Return the block in which the learner may compute, write and read."""

    async def start(self) -> None:
        """As `Learner.start`."""
        await self._learner.start()

    async def train(self, step: int, groups: Sequence[GroupRef]) -> TrainResult:
        """As `Learner.train`, undisturbed."""
        async with self.undisturbed():
            return await self._learner.train(step, groups)

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """As `Learner.export_weights`."""
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
        """As `Learner.save_model`, undisturbed."""
        async with self.undisturbed():
            await self._learner.save_model(path)

    async def save_checkpoint(self, path: str, step: int) -> None:
        """As `Learner.save_checkpoint`, undisturbed."""
        async with self.undisturbed():
            await self._learner.save_checkpoint(path, step)

    async def seal_checkpoint(self, path: str) -> Mapping[str, FileEntry]:
        """As `Learner.seal_checkpoint`."""
        return await self._learner.seal_checkpoint(path)

    async def map_files(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """As `Learner.map_files`."""
        return await self._learner.map_files(work, files, *arguments)

    async def load_checkpoint(self, path: str) -> int:
        """As `Learner.load_checkpoint`, undisturbed."""
        async with self.undisturbed():
            return await self._learner.load_checkpoint(path)

    async def close(self) -> None:
        """As `Learner.close`."""
        await self._learner.close()
