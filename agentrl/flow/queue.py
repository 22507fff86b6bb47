"""The queue between generation and training: first-in first-out by order of admission.

Order of arrival would break the staleness bound: slow groups would be overtaken again and again while their tokens age.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import anyio

from agentrl.core.errors import LedgerError, StalenessError
from agentrl.core.protocols import GroupRef
from agentrl.core.types import GroupSummary, Ticket


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group that may be trained on.

    Attributes:
        ticket: As admitted.
        ref: The group, or the cluster's reference to it.
        summary: What the driver knows of it.
        accepted_s: Clock reading when it entered the queue.
    """

    ticket: Ticket
    ref: GroupRef
    summary: GroupSummary
    accepted_s: float


class GroupQueue:
    """Holds groups from admission until a step takes them.

    Args:
        max_staleness: Largest lag, in steps, with which a group may be taken.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._open: deque[int] = deque()  # admitted, from the oldest that is not resolved on
        self._resolved: dict[int, Accepted | None] = {}  # behind an older group that is not resolved; None: gone
        self._ready: deque[Accepted] = deque()  # every older group is resolved
        self._unresolved: set[int] = set()
        self._closed = False
        self._changed: anyio.Event | None = None

    @property
    def depth(self) -> int:
        """Accepted groups that no step has taken."""
        return len(self._ready) + sum(entry is not None for entry in self._resolved.values())

    @property
    def unresolved(self) -> int:
        """Admitted groups that are neither accepted nor gone."""
        return len(self._unresolved)

    def admit(self, group_id: int) -> None:
        """Give `group_id` the last place in the line.

        Raises:
            LedgerError: If the queue is closed or an id is not larger than all before it.
        """
        if self._closed or (self._open and group_id <= self._open[-1]):
            raise LedgerError(f"group {group_id} cannot be admitted: closed = {self._closed}, last in line {list(self._open)[-1:]}")
        self._open.append(group_id)
        self._unresolved.add(group_id)

    def accept(self, group: Accepted) -> None:
        """Resolve a group: it waits for its turn to be trained on."""
        self._resolve(group.ticket.group_id, group)

    def discard(self, group_id: int) -> None:
        """Resolve a group: it was filtered or dropped and leaves the line."""
        self._resolve(group_id, None)

    def close(self) -> None:
        """Say that no further group will be admitted, so that a last, smaller step can be taken."""
        self._closed = True
        self._wake()

    async def take(self, count: int, step: int) -> list[Accepted]:
        """Wait for the `count` oldest live groups, all accepted, and remove them.

        Args:
            count: Groups of one step.
            step: The step that takes them, from 0, which is also the version of the weights they will train.

        Returns:
            `count` groups, oldest first. Fewer, perhaps none, only when the queue is closed and nothing is left behind them.

        Raises:
            StalenessError: If one of them is older than the bound, or newer than the weights it would train.
        """
        while len(self._ready) < count and not (self._closed and not self._open):
            self._changed = anyio.Event()
            await self._changed.wait()
        taken = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
        for group in taken:
            self._check_lag(group, step)
        return taken

    def _resolve(self, group_id: int, entry: Accepted | None) -> None:
        if group_id not in self._unresolved:
            raise LedgerError(f"group {group_id} is resolved twice or was never admitted")
        self._unresolved.remove(group_id)
        self._resolved[group_id] = entry
        while self._open and self._open[0] in self._resolved:
            head = self._resolved.pop(self._open.popleft())
            if head is not None:
                self._ready.append(head)
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _check_lag(self, group: Accepted, step: int) -> None:
        versions = group.summary.versions
        if versions is None:
            raise StalenessError(f"group {group.ticket.group_id} was accepted without a single trainable token")
        if step - versions[0] > self.max_staleness or versions[1] > step:
            raise StalenessError(
                f"group {group.ticket.group_id} holds tokens of versions {versions[0]} to {versions[1]}, "
                f"and step {step} may train on {max(0, step - self.max_staleness)} to {step} only"
            )
