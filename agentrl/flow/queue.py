"""Stations of a group in the driver: its admission, its slot, the inbox of finished attempts, and the queue before training.

The queue is first-in first-out by order of admission. Order of arrival would break the staleness bound: slow groups would be overtaken
again and again while their tokens age.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from agentrl.core.errors import LedgerError, StalenessError
from agentrl.core.protocols import GroupRef
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest, Task
from agentrl.env.tasks import TaskSource
from agentrl.flow.checkpoint import Progress


class Release(Enum):
    """Reason for which a slot is given back."""

    TRAINED = auto()
    """The weights trained on the group are live; one group of the run's total is done."""
    OVERSAMPLED = auto()
    """The group was not needed for a step whose weights are live; one group of the run's total is done."""
    FILTERED = auto()
    """The filter rejected the group; another may take its place."""
    LEFT_OUT = auto()
    """The filter rejected the group, its step went on without it, and its weights are live; one group of the run's total is done."""
    DROPPED = auto()
    """The group failed for good; another may take its place."""
    UNUSED = auto()
    """No task was left to put into the slot."""


class Slots:
    """Counts groups under way, at most `capacity` = (S + 1) x G, and never lets more start than the remaining steps can use.

    The steps of the whole run remove `total` groups; none is admitted beyond the rest of these.
    """

    def __init__(self, capacity: int, total: int) -> None:
        self.capacity, self.total = capacity, total
        self._held: set[int] = set()
        self._done = 0
        self._closed = False
        self._changed: asyncio.Event | None = None

    @property
    def in_use(self) -> int:
        """Slots held now."""
        return len(self._held)

    async def acquire(self, group_id: int) -> bool:
        """Wait for a slot and take it for `group_id`; False, without a slot, once all needed groups are done, or after `close`.

        Raises:
            LedgerError: If the group already holds a slot.
        """
        if group_id in self._held:
            raise LedgerError(f"group {group_id} asks for a second slot")
        while self._closed or not self._available():
            if self._closed or self._done >= self.total:
                return False
            self._changed = asyncio.Event()
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
        if reason in (Release.TRAINED, Release.OVERSAMPLED, Release.LEFT_OUT):
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


class Admissions:
    """Hands out the tasks with their group ids: first the open groups of a resumed run, by growing id, then new ones.

    Sampling seeds depend on task and epoch, not on time, so a repeated group is sampled as it would have been.
    """

    def __init__(self, tasks: Iterator[Task], progress: Progress, repeat: Sequence[tuple[int, Task]] = ()) -> None:
        self._tasks, self._repeat = tasks, deque(repeat)
        self._sampler = tasks.sampler if isinstance(tasks, TaskSource) else None
        self._next_id, self._cursor = progress.next_group_id, (progress.epoch, progress.position)
        self._places = {group_id: (epoch, position) for group_id, epoch, position in progress.open_groups}

    @property
    def next_id(self) -> int:
        """Id of the group that the next task makes."""
        return self._repeat[0][0] if self._repeat else self._next_id

    def draw(self) -> Task | None:
        """The task of group `next_id`; `None` when there is none left."""
        if self._repeat:
            return self._repeat.popleft()[1]
        task = next(self._tasks, None)
        if task is not None:
            self._places[self._next_id] = (task.epoch, task.position)
            self._next_id, self._cursor = self._next_id + 1, (task.epoch, task.position + 1)
        return task

    def closed(self, group_request: GroupRequest, summary: GroupSummary) -> None:
        """Tell the sampler how a group went, once, when it is trained on or filtered; one that is run again is not closed before."""
        if self._sampler is not None:
            scores = [member.score for member in summary.trainable if member.score is not None]
            self._sampler.outcome(group_request.task.position, group_request.group_id, scores)

    def step_done(self) -> dict[str, float]:
        """Let the sampler draw by all that is known after a step, and return its metrics."""
        if self._sampler is None:
            return {}
        self._sampler.begin_round()
        return self._sampler.metrics()

    def progress(self, *, step: int, in_flight: set[int], **accounts: Any) -> Progress:
        """Return the progress of the run; `accounts` are the other attributes of `Progress`."""
        # Open groups of an earlier part that are not admitted again yet are in no ledger, and must not be lost.
        is_open = in_flight | {group_id for group_id, _ in self._repeat}
        self._places = {group_id: place for group_id, place in self._places.items() if group_id in is_open}
        groups = tuple((group_id, *place) for group_id, place in self._places.items())
        epoch, position = self._cursor
        accounts["sampling"] = {} if self._sampler is None else self._sampler.state()
        return Progress(step=step, next_group_id=self._next_id, epoch=epoch, position=position, open_groups=groups, **accounts)


@dataclass(frozen=True, slots=True)
class Finished:
    """One attempt at a group that came to its end."""

    group_request: GroupRequest
    summary: GroupSummary
    ref: GroupRef


TOGETHER = 16
"""Groups that a loop handles before it lets the others go on, if nothing else makes it wait."""


class Inbox:
    """Finished attempts on their way to `collect`; cheaper than a stream between any two tasks."""

    def __init__(self) -> None:
        self._items: deque[Finished] = deque()
        self._changed = asyncio.Event()
        self._closed, self._taken = False, 0

    def put(self, finished: Finished) -> None:
        """Hand an attempt on."""
        self._items.append(finished)
        self._changed.set()

    def close(self) -> None:
        """Say that no further attempt is waited for; safe to call twice."""
        self._closed = True
        self._changed.set()

    async def take(self) -> Finished | None:
        """Wait for the next attempt, in the order in which they finished; `None` once it is closed and empty."""
        self._taken += 1
        if self._taken % TOGETHER == 0:
            await asyncio.sleep(0)
        while not self._items and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft() if self._items else None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group that a step may take: to be trained on, or, if the filter rejected it, to be left out."""

    group_request: GroupRequest  # as admitted
    ref: GroupRef  # the group, or the cluster's reference to it
    summary: GroupSummary  # what the driver knows of it
    accepted_s: float  # clock reading when it entered the queue
    rejected: str = ""  # why the filter rejected it; empty if it may be trained on


@dataclass(frozen=True, slots=True)
class Taken:
    """Groups that one step removes from the line."""

    groups: list[Accepted]  # to be trained on, oldest first; empty when nothing is left, or all of them were rejected
    oversampled: list[int]  # ids of the groups that were started beyond those of the step and are not needed
    rejected: list[Accepted] = field(default_factory=list)  # in the step's place in the line, and left out of it


_ABSENT = object()


class GroupQueue:
    """Holds groups from admission until a step takes them.

    A step removes the oldest `count` + `oversampled` groups of the line, its window: it takes the first `count` of them to be
    accepted, and gives up the rest. So every step moves the line on by as many groups, whichever finish first. A group may be
    taken with a lag of at most `max_staleness` steps.
    """

    def __init__(self, max_staleness: int, count: int, oversampled: int = 0) -> None:
        self.max_staleness, self.count, self.oversampled = max_staleness, count, oversampled
        self._window: dict[int, Accepted | None] = {}  # in order of admission; None: not resolved
        self._behind: OrderedDict[int, Accepted | None] = OrderedDict()
        self._accepted = 0  # in the window
        self._accepted_behind = 0
        self._last_id = -1
        self._closed = self._stopped = False
        self._changed: asyncio.Event | None = None

    @property
    def depth(self) -> int:
        """Accepted groups that no step has taken."""
        return self._accepted + self._accepted_behind

    def waits_for(self, group_id: int) -> bool:
        """Return true if the group is in the line and not resolved."""
        part = self._window if group_id in self._window else self._behind
        return part.get(group_id, _ABSENT) is None

    def admit(self, group_id: int) -> None:
        """Give `group_id` the last place in the line.

        Raises:
            LedgerError: If the queue is closed or an id is not larger than all before it.
        """
        if self._closed or group_id <= self._last_id:
            raise LedgerError(f"group {group_id} cannot be admitted: closed = {self._closed}, last in line {self._last_id}")
        self._behind[group_id] = None
        self._last_id = group_id
        self._fill_window()

    def accept(self, group: Accepted) -> None:
        """Resolve a group: it waits for its step."""
        group_id = group.group_request.group_id
        self._check_unresolved(group_id)
        if group_id in self._window:
            self._window[group_id] = group
            self._accepted += 1
            self._wake()
        else:
            self._behind[group_id] = group
            self._accepted_behind += 1

    def discard(self, group_id: int) -> None:
        """Resolve a group: it was filtered or dropped and leaves the line."""
        self._check_unresolved(group_id)
        del (self._window if group_id in self._window else self._behind)[group_id]
        self._fill_window()

    def close(self) -> None:
        """Say that no further group will be admitted, so that a last, smaller step can be taken."""
        self._closed = True
        self._wake()

    def stop(self) -> None:
        """Let nothing be taken any more; what is in the line stays there."""
        self._stopped = True
        self._wake()

    async def take(self, step: int) -> Taken:
        """Wait until enough of the oldest groups are accepted for `step`, from 0, and remove the whole window from the line.

        Returns:
            `count` groups, rejected ones included. Fewer, perhaps none, only when the queue is closed and nothing is left behind them; none
            after `stop`.

        Raises:
            StalenessError: If one of them is older than the bound, or newer than the weights it would train.
        """
        while not (self._stopped or self._complete()):
            self._changed = asyncio.Event()
            await self._changed.wait()
        if self._stopped:
            return Taken([], [])
        accepted = [group for group in self._window.values() if group is not None]
        ranked = sorted(accepted, key=lambda group: (group.rejected != "", group.accepted_s))
        first = {group.group_request.group_id for group in ranked[: self.count]}
        # The groups keep the order of admission, so that a batch does not depend on which of them finished first.
        groups = [group for group in accepted if group.group_request.group_id in first]
        taken = Taken(
            groups=[group for group in groups if not group.rejected],
            oversampled=[group_id for group_id in self._window if group_id not in first],
            rejected=[group for group in groups if group.rejected],
        )
        self._window, self._accepted = {}, 0
        self._fill_window()
        # Slots bound the lag already. A mistake there would train on old tokens without any sign, so it is checked again.
        for group in taken.groups:
            self._check_lag(group, step)
        return taken

    def _complete(self) -> bool:
        """Return true if a step can be taken; never before the window is full, because slots would be free while the step is trained."""
        full = len(self._window) == self.count + self.oversampled
        return (full or self._closed) and self._accepted >= min(self.count, len(self._window))

    def _fill_window(self) -> None:
        while self._behind and len(self._window) < self.count + self.oversampled:
            group_id, entry = self._behind.popitem(last=False)
            self._window[group_id] = entry
            self._accepted += entry is not None
            self._accepted_behind -= entry is not None
        self._wake()

    def _check_unresolved(self, group_id: int) -> None:
        if not self.waits_for(group_id):
            raise LedgerError(f"group {group_id} is resolved twice or was never admitted")

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _check_lag(self, group: Accepted, step: int) -> None:
        versions = group.summary.versions
        if versions is None:
            raise StalenessError(f"group {group.group_request.group_id} was accepted without a single trainable token")
        if step - versions[0] > self.max_staleness or versions[1] > step:
            raise StalenessError(
                f"group {group.group_request.group_id} holds tokens of versions {versions[0]} to {versions[1]}, "
                f"and step {step} may train on {max(0, step - self.max_staleness)} to {step} only"
            )
