"""Admission slots: what bounds staleness.

A group holds one of (S + 1) x G slots from admission until it is filtered or dropped, or until the weights trained on
it are live. At admission under live version v, every other held slot belongs to a group that no step before v has
taken; with groups taken first-in first-out, at most (S + 1) x G - 1 of them come first, so this one is taken by step v + S.

With over-sampling, G counts the spare groups too: a step removes the oldest G groups of the line, trained on or not, and
all of their slots are given back when its weights are live.
"""

from __future__ import annotations

from enum import Enum, auto

import anyio

from agentrl.core.errors import LedgerError


class Release(Enum):
    """Why a slot is given back."""

    TRAINED = auto()
    """The weights trained on the group are live; one group of the run's total is done."""
    SPARE = auto()
    """The group was not needed for a step whose weights are live; one group of the run's total is done."""
    FILTERED = auto()
    """The filter rejected the group; another may take its place."""
    DROPPED = auto()
    """The group failed for good; another may take its place."""
    UNUSED = auto()
    """There was no task left to put into it."""


class Slots:
    """Counts groups under way, and never lets more start than the remaining steps can use.

    Args:
        capacity: Groups under way at once, (S + 1) x G.
        total: Groups that the steps of the whole run remove; none is admitted beyond what is still needed for it.
    """

    def __init__(self, capacity: int, total: int) -> None:
        self.capacity, self.total = capacity, total
        self._held: set[int] = set()
        self._done = 0
        self._closed = False
        self._changed: anyio.Event | None = None

    @property
    def in_use(self) -> int:
        """Slots held now."""
        return len(self._held)

    async def acquire(self, group_id: int) -> bool:
        """Wait for a slot and take it for `group_id`.

        Returns:
            False, without a slot, once every group that the run needs is done, or after `close`.

        Raises:
            LedgerError: If the group already holds a slot.
        """
        if group_id in self._held:
            raise LedgerError(f"group {group_id} asks for a second slot")
        while self._closed or not self._available():
            if self._closed or self._done >= self.total:
                return False
            self._changed = anyio.Event()
            await self._changed.wait()
        self._held.add(group_id)
        return True

    def release(self, group_id: int, reason: Release) -> None:
        """Give the slot of `group_id` back.

        Raises:
            LedgerError: If the group holds no slot.
        """
        if group_id not in self._held:
            raise LedgerError(f"group {group_id} gives back a slot that it does not hold ({reason.name.lower()})")
        self._held.remove(group_id)
        if reason in (Release.TRAINED, Release.SPARE):
            self._done += 1
        self._wake()

    def close(self) -> None:
        """Hand out no slot any more; those held are given back as before."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _available(self) -> bool:
        return len(self._held) < min(self.capacity, self.total - self._done)
