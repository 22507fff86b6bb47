"""Tasks that a run began with, by which a resumed run tells what was added to them, and what is not what it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from agentrl.core.errors import DataError
from agentrl.core.fingerprints import ACCEPT
from agentrl.core.types import Task

SHOWN = 5
"""Changed tasks that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTasks:
    """Tasks as a run has read them.

    Attributes:
        digests: Digest of each task by its id, in the order in which they were read.
        held_out: Ids of those that are never drawn.
        growth: Epochs from which on more tasks are drawn, each with the number of tasks to train on; the first epoch is 0.
        has_end: False for the first tasks of an iterable that may have no end.
    """

    digests: Mapping[str, str]
    held_out: tuple[str, ...] = ()
    growth: tuple[tuple[int, int], ...] = ()
    has_end: bool = True

    def to_json(self) -> dict[str, Any]:
        """In JSON's own types."""
        growth = [list(each) for each in self.growth]
        return {"digests": dict(self.digests), "held_out": list(self.held_out), "growth": growth, "has_end": self.has_end}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KnownTasks:
        """The inverse of `to_json`."""
        growth = tuple((int(epoch), int(count)) for epoch, count in data["growth"])
        return cls(digests=data["digests"], held_out=tuple(data["held_out"]), growth=growth, has_end=bool(data["has_end"]))

    def ordered(self, tasks: Sequence[Task], origin: str) -> list[Task]:
        """Return tasks that are read now in the order of those that are known, what was added behind them.

        Raises:
            DataError: If one is gone, or has another content.
        """
        now = {task.id: task for task in tasks}
        gone = [task_id for task_id in self.digests if task_id not in now]
        changed = [task_id for task_id, digest in self.digests.items() if task_id in now and digest_of(now[task_id]) != digest]
        for named, word in ((gone, "gone"), (changed, "changed")):
            if named:
                shown = ", ".join(named[:SHOWN]) + (f" and {len(named) - SHOWN} more" if len(named) > SHOWN else "")
                problem = f"{len(named)} of {len(self.digests)} tasks with which the run began are {word}: {shown}"
                raise DataError("tasks", origin, problem, f"Restore them, or add {ACCEPT}, with which tasks are drawn in a new order.")
        return [*(now[task_id] for task_id in self.digests), *(task for task in tasks if task.id not in self.digests)]


def known_tasks(tasks: Sequence[Task], held_out: Sequence[Task] = (), *, has_end: bool = True) -> KnownTasks:
    """Return what is to be known of tasks, those held out among them."""
    return KnownTasks(digests={task.id: digest_of(task) for task in tasks}, held_out=tuple(t.id for t in held_out), has_end=has_end)


def digest_of(task: Task) -> str:
    """Return a digest of everything that a task says but its id; of an object that is no value of JSON's only the type counts."""
    content = [task.prompt, task.label, task.images, task.seed, dict(task.metadata)]
    # The text of an object may hold its address, which is another one in each process.
    text = json.dumps(content, default=lambda value: type(value).__qualname__)
    return blake2b(text.encode(), digest_size=8).hexdigest()
