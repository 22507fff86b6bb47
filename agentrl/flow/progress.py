"""Progress of a run between two steps, small enough to be written with every checkpoint, and the continuation from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from agentrl.core.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The accounts of a run after a step.

    Attributes:
        step: Steps done, which is the version of the weights.
        next_group_id: Id of the first group never admitted.
        epoch: Cursor of the tasks: the epoch of the first task never admitted.
        position: Its place in the epoch.
        open_groups: Group id, epoch and position of what was admitted and neither trained, filtered nor dropped.
        trained: Groups trained on.
        filtered: Reason -> groups.
        dropped: Reason -> groups.
        elapsed_s: Time the run has taken.
    """

    step: int = 0
    next_group_id: int = 0
    epoch: int = 0
    position: int = 0
    open_groups: tuple[tuple[int, int, int], ...] = ()
    trained: int = 0
    filtered: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """The inverse of `to_json`.

        Raises:
            TypeError: If a key is missing or unknown.
        """
        groups = tuple((int(group), int(epoch), int(position)) for group, epoch, position in data["open_groups"])
        return cls(**{**data, "open_groups": groups})


class TaskCursor(Protocol):
    """Tasks in an order that can be entered anywhere."""

    def restore(self, state: Mapping[str, int]) -> None:
        """Go to an epoch and position."""

    def draw(self) -> Task:
        """The next task."""
        ...


def repeated_tasks(tasks: TaskCursor, progress: Progress) -> list[tuple[int, Task]]:
    """The open groups with their tasks, in order of admission; afterwards the next draw gives the first task never admitted."""
    places = {(epoch, position): group_id for group_id, epoch, position in progress.open_groups}
    end = (progress.epoch, progress.position)
    epoch, position = min([*places, end])
    tasks.restore({"epoch": epoch, "position": position})
    found: list[tuple[int, Task]] = []
    while len(found) < len(places):
        task = tasks.draw()
        group_id = places.get((task.epoch, task.position))
        if group_id is not None:
            found.append((group_id, task))
    tasks.restore({"epoch": progress.epoch, "position": progress.position})
    return found


class Admissions:
    """Which task comes next, and under which group id: first what a resumed run has to repeat, then new ones.

    Sampling seeds depend on task and epoch, not on time, so a repeated group is sampled as it would have been.

    Args:
        tasks: New tasks.
        progress: Where the run stands.
        repeat: Open groups with their tasks, by growing id.
    """

    def __init__(self, tasks: Iterator[Task], progress: Progress, repeat: Sequence[tuple[int, Task]] = ()) -> None:
        self._tasks, self._repeat = tasks, deque(repeat)
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

    def progress(self, *, step: int, in_flight: set[int], **accounts: Any) -> Progress:
        """Return the progress of the run.

        Args:
            step: Steps done.
            in_flight: Admitted groups that are neither trained, filtered nor dropped.
            accounts: The other attributes of `Progress`.
        """
        is_open = in_flight | {group_id for group_id, _ in self._repeat}
        self._places = {group_id: place for group_id, place in self._places.items() if group_id in is_open}
        groups = tuple((group_id, *place) for group_id, place in self._places.items())
        epoch, position = self._cursor
        return Progress(step=step, next_group_id=self._next_id, epoch=epoch, position=position, open_groups=groups, **accounts)
