"""Sources of tasks and the order of drawing; runs on the driver, loads no model library."""

from __future__ import annotations

import itertools
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.core.errors import ConfigError, DataError
from agentrl.core.fingerprints import ACCEPT
from agentrl.core.types import Task, derive_seed
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.images import image_texts
from agentrl.env.known_tasks import KnownTasks, known_tasks
from agentrl.env.prompts import PromptSet, is_chat
from agentrl.env.sampling import Sampling, TaskSampler


class TaskOrder:
    """Epochs over a collection whose parts are drawn in proportions of `weights`; part i holds the tasks after those of part i-1.

    No task occurs twice in an epoch. With one part, an epoch is the whole collection. With several, the next task comes from the part
    that is furthest behind its share; an epoch ends when one part has been drawn completely. That part then starts again in a new
    order, and the others continue.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float] = (1.0,),
        *,
        seed: int = 0,
        shuffle: bool = True,
        growth: Sequence[tuple[int, int]] = (),  # epochs from which on the only part has another size, with that size
    ) -> None:
        self._growth = growth
        total = sum(weights)
        self._sizes, self._shares = tuple(sizes), tuple(weight / total for weight in weights)
        self._starts = tuple(sum(sizes[:part]) for part in range(len(sizes)))
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._drawn = 0, [0] * len(sizes)

    def epoch(self, number: int) -> list[int]:
        """Return the indices of an epoch's tasks in drawing order; with several parts, time grows with the number of draws before it."""
        if len(self._sizes) == 1:
            return self._pass(0, number)
        if number < self._epoch:
            self._epoch, self._drawn = 0, [0] * len(self._sizes)
        while self._epoch < number:
            self._parts()
            self._epoch += 1
        before = tuple(self._drawn)
        parts, self._epoch = self._parts(), self._epoch + 1
        orders = [self._pass(part, drawn // size) for part, (drawn, size) in enumerate(zip(before, self._sizes, strict=True))]
        places = [drawn % size for drawn, size in zip(before, self._sizes, strict=True)]
        found: list[int] = []
        for part in parts:
            found.append(orders[part][places[part]])
            places[part] += 1
        return found

    def _parts(self) -> list[int]:
        """Return the part of each task in the next epoch, and move the cursor past that epoch."""
        drawn, shares, sizes = self._drawn, self._shares, self._sizes
        number, parts = sum(drawn), list[int]()
        while True:
            number += 1
            part = max(range(len(sizes)), key=lambda index: number * shares[index] - drawn[index])
            drawn[part] += 1
            parts.append(part)
            if drawn[part] % sizes[part] == 0:
                return parts

    def _pass(self, part: int, number: int) -> list[int]:
        start = self._starts[part]
        size = next((size for epoch, size in reversed(self._growth) if epoch <= number), self._sizes[part])
        order = list(range(start, start + size))
        if self._shuffle:
            # A single part has the seeds that collections had before there were parts, so that runs go on in the same order.
            more = (part,) if len(self._sizes) > 1 else ()
            random.Random(derive_seed(self._seed, "tasks", number, *more)).shuffle(order)
        return order


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportions of `weights` that sum to `count`."""
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_rest = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_rest[: count - sum(parts)]:
        parts[index] += 1
    return parts


PEEK, FIRST = 4096, 64
"""Tasks of an iterable that are read to see whether it ends, and those of one without an end that are compared when a run is resumed."""


class TaskSource:
    """Endless draws of tasks: epoch after epoch of a finite collection, or an endless iterable in its own order.

    A collection with a length, or with fewer than 4,096 tasks, is finite and shuffled in each epoch. A longer iterable is
    read in its own order, and from the beginning again if it ends. Epoch and position are the whole state of the source,
    because the task at each position depends only on the seed; with `sampling`, which needs a finite collection, the state of the
    sampler is. Then the position of a task is its place in the collection, and its epoch says how often it was drawn before.

    Args:
        load: Returns the tasks from the beginning at each call.
        origin: Origin of the tasks, for messages.
        seed: Seed of the run; seed and epoch decide the order.
        shuffle: Shuffle finite collections.
        holdout: Number of tasks that are never drawn: chosen by the seed in a finite collection, else the first ones.
        mixture: Size and weight of each part of a finite collection; see `TaskOrder`.
        sampling: Draw by pass rates instead of epochs; see `TaskSampler`.
        known: Tasks with which the run began. They keep their order, and the same ones are held out; what was added comes behind them, from
            the epoch after `epoch` on.
        epoch: Epoch in which a resumed run draws.

    Raises:
        DataError: If there is no task, or a task is unusable.
        ConfigError: If no task is left to train on after `holdout`, or `sampling` has no finite collection.

    Attributes:
        held_out: The held-out tasks, in their own order.
        known: The tasks as they are now, for a run that is resumed later.
        num_added: Tasks that `known` did not have.
        sampler: Draws the tasks, and is told how they went; `None` without `sampling`.
    """

    def __init__(
        self,
        load: Callable[[], Iterable[Task]],
        *,
        origin: str,
        seed: int = 0,
        shuffle: bool = True,
        holdout: int = 0,
        mixture: Sequence[tuple[int, float]] = (),
        sampling: Sampling | None = None,
        known: KnownTasks | None = None,
        epoch: int = 0,
    ) -> None:
        self._load, self._origin, self._seed, self._shuffle = load, origin, seed, shuffle
        self._holdout, self._mixture = holdout, mixture
        self._before, self._now, self.num_added = known, epoch, 0
        self.held_out: list[Task] = []
        self.known = KnownTasks(digests={})
        self._epoch = self._position = 0
        self._tasks: Sequence[Task] | None = None
        self._order = TaskOrder(())
        self._stream: Iterator[Task] = iter(())
        self._begin()
        self.sampler = None if sampling is None else self._sampler(sampling)

    @classmethod
    def from_agent(cls, agent: AgentSpec, **options: Any) -> TaskSource:
        """Draw from the environment's own ``tasks``; `ConfigError` if it has none. The options are those of the class."""
        origin = f"{agent.source}: {agent.name}.tasks"

        def load() -> Iterable[Task]:
            tasks = own_tasks(agent, "tasks")
            if tasks is None:
                problem = f"is not given, and {agent.name} has no tasks of its own"
                raise ConfigError("--prompts", "", problem, f"Name a data set, or add a classmethod tasks() to {agent.name}.")
            return tasks

        return cls(load, origin=origin, **options)

    @classmethod
    def from_prompts(cls, parts: Sequence[PromptSet], *, weights: Sequence[float] = (), **options: Any) -> TaskSource:
        """Draw from data sets in proportions of `weights`; without weights all data sets form one collection. See the class for options."""
        tasks = [task for part in parts for task in part.tasks]
        mixture = [(len(part.tasks), weight) for part, weight in zip(parts, weights, strict=True)] if weights else ()
        origin = ", ".join(part.name for part in parts)
        return cls(lambda: tasks, origin=origin, mixture=mixture, **options)

    @property
    def num_tasks(self) -> int | None:
        """Number of tasks to train on; `None` if not known."""
        return len(self._tasks) if self._tasks is not None else None

    def draw(self) -> Task:
        """Return the next task, with epoch and position filled in; `DataError` if the iterable fails or yields something else."""
        if self.sampler is not None:
            return self.at(*self.sampler.draw())
        task = self._next()
        if task is None:
            self._epoch, self._position = self._epoch + 1, 0
            self._begin()
            task = self._next()
        if task is None:
            raise DataError("tasks", self._origin, "gave no task the second time", "Return a list, or a new iterator on each call.")
        self._position += 1
        return replace(task, position=self._position - 1, epoch=self._epoch)

    def at(self, position: int, epoch: int) -> Task:
        """Return the task of an earlier draw of the sampler."""
        if self._tasks is None or position >= len(self._tasks):
            raise DataError("tasks", self._origin, f"has no task {position}", "Resume with the tasks that the run began with.")
        return replace(self._tasks[position], position=position, epoch=epoch)

    def first(self, count: int) -> list[Task]:
        """Return up to `count` tasks from the beginning, in their own order, without drawing them."""
        tasks = self._tasks if self._tasks is not None else itertools.islice(checked(self._load(), self._origin), self._holdout, None)
        return list(itertools.islice(tasks, count))

    def state(self) -> dict[str, int]:
        """Return the cursor, from which `restore` continues with the same tasks."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a cursor; an endless iterable is read again up to the cursor."""
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._begin()

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        return self.draw()

    def _next(self) -> Task | None:
        return next(self._stream, None)

    def _sampler(self, sampling: Sampling) -> TaskSampler:
        if self._tasks is None:
            problem = f"needs a collection with an end, and {self._origin} goes on after {PEEK} tasks"
            raise ConfigError("--task-sampling", sampling.rule, problem, "Return a list, or use --task-sampling epochs.")
        return TaskSampler(self._tasks, sampling, self._seed)

    def _begin(self) -> None:
        """Start the current epoch at the current position."""
        if self._tasks is None:
            self._read()
        if self._tasks is not None:
            tasks = self._tasks
            self._stream = (tasks[index] for index in self._order.epoch(self._epoch))
        skipped = sum(1 for _ in itertools.islice(self._stream, self._position))
        if skipped < self._position:
            problem = f"has only {skipped} tasks in epoch {self._epoch}, the cursor is at {self._position}"
            raise DataError("tasks", self._origin, problem, "Resume with the tasks that the run began with.")

    def _read(self) -> None:
        loaded = self._load()
        stream = checked(loaded, self._origin)
        limit = PEEK + self._holdout
        # A sequence has an end, however long it is; anything else may have none, and is read only so far.
        head = list(stream) if isinstance(loaded, Sequence) else list(itertools.islice(stream, limit))
        if not head:
            raise DataError("tasks", self._origin, "holds no task", "Give at least one.")
        before = self._before
        if isinstance(loaded, Sequence) or len(head) < limit:
            tasks = unique(head, self._origin)
            if before is not None:
                tasks = before.ordered(tasks, self._origin)
                self.num_added = len(tasks) - len(before.digests)
            self._tasks = self._hold_out(tasks)
        else:
            first = head[: self._holdout + FIRST]
            if before is not None:
                before.ordered(first, self._origin)
            self.held_out = head[: self._holdout]
            self.known = known_tasks(first, self.held_out, has_end=False)
            self._stream = itertools.chain(head[self._holdout :], stream)

    def _hold_out(self, tasks: list[Task]) -> list[Task]:
        """Hold out tasks of each part by its weight, or those that were held out before; return the tasks to train on."""
        if self._before is not None and (not self._mixture or not self.num_added):
            return self._hold_out_again(tasks, self._before)
        if self.num_added:
            problem = f"has {self.num_added} tasks that were added since the run began, and --prompt-probs fixes how data sets are drawn"
            raise DataError("tasks", self._origin, problem, f"Leave them out, or add {ACCEPT}, with which tasks are drawn in a new order.")
        sizes, weights = zip(*self._mixture or [(len(tasks), 1.0)], strict=True)
        held = shares(self._holdout, weights)
        if any(count >= size for count, size in zip(held, sizes, strict=True)):
            problem = f"leaves nothing to train on of {' + '.join(map(str, sizes))} tasks ({self._origin})"
            raise ConfigError("--eval-size", self._holdout, problem, "Lower it, or name other tasks with --eval-prompts.")
        chosen: set[int] = set()
        for part, (count, size) in enumerate(zip(held, sizes, strict=True)):
            start = sum(sizes[:part])
            chosen.update(random.Random(derive_seed(self._seed, "eval", part)).sample(range(start, start + size), count))
        left = [size - count for size, count in zip(sizes, held, strict=True)]
        self._order = TaskOrder(left, weights, seed=self._seed, shuffle=self._shuffle)
        self.held_out = [tasks[index] for index in sorted(chosen)]
        self.known = known_tasks(tasks, self.held_out)
        return [task for index, task in enumerate(tasks) if index not in chosen]

    def _hold_out_again(self, tasks: list[Task], before: KnownTasks) -> list[Task]:
        held = set(before.held_out)
        self.held_out = [task for task in tasks if task.id in held]
        left = [task for task in tasks if task.id not in held]
        growth = before.growth or ((0, len(before.digests) - len(held)),)
        if self.num_added:
            # An epoch that has begun is drawn as it began; tasks that were added twice in it begin with the next one together.
            growth = (*(each for each in growth if each[0] <= self._now), (self._now + 1, len(left)))
        self.known = replace(known_tasks(tasks, self.held_out), growth=growth)
        if self._mixture:
            sizes, weights = zip(*self._mixture, strict=True)
            held_of = shares(self._holdout, weights)
            sizes = tuple(size - count for size, count in zip(sizes, held_of, strict=True))
            self._order = TaskOrder(sizes, weights, seed=self._seed, shuffle=self._shuffle)
        else:
            self._order = TaskOrder((len(left),), seed=self._seed, shuffle=self._shuffle, growth=growth)
        return left


def own_tasks(agent: AgentSpec, method: str) -> Iterable[Task] | None:
    """Return the environment's ``tasks`` or ``eval_tasks``; `None` if there is no such method or it returns `None`."""
    tasks = getattr(agent.load(), method, None)
    origin = f"{agent.source}: {agent.name}.{method}"
    try:
        loaded = tasks() if callable(tasks) else tasks
    except Exception as error:
        lines = traceback.format_exception(error)
        remedy = "Make it a @classmethod." if isinstance(error, TypeError) and "self" in str(error) else "".join(lines)[-2000:]
        raise DataError(method, origin, f"raised {type(error).__name__}: {error}", remedy) from error
    if loaded is not None and not isinstance(loaded, Iterable):
        raise DataError(method, origin, f"gave a {type(loaded).__name__}", "Return a list of Task, or yield them.")
    return loaded


def checked(tasks: Iterable[Task], origin: str) -> Iterator[Task]:
    """Yield each task checked; a task without an id gets its index as id, and `origin` says where the tasks came from."""
    iterator = iter(tasks)
    for index in itertools.count():
        try:
            task = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise DataError("tasks", origin, f"raised {type(error).__name__}: {error} at task {index}", "") from error
        if not isinstance(task, Task):
            raise DataError(f"tasks[{index}]", task, f"is a {type(task).__name__}, not a Task ({origin})", "Wrap it: Task(prompt, label).")
        _check_prompt(task.prompt, f"tasks[{index}].prompt", origin)
        yield _numbered(task, index, origin)


def _numbered(task: Task, index: int, origin: str) -> Task:
    """Return a task with an id, and with images as paths and data URLs."""
    named = task if task.id else replace(task, id=str(index))
    if not task.images:
        return named
    try:
        return replace(named, images=image_texts(task.images))
    except ValueError as error:
        raise DataError(f"tasks[{index}].images", named.id, f"{error} ({origin})", "") from error


def _check_prompt(prompt: Any, field: str, origin: str) -> None:
    if not (bool(prompt) if isinstance(prompt, str) else is_chat(prompt)):
        raise DataError(field, repr(prompt)[:80], f"is neither text nor a list of messages with role and content ({origin})", "")


def unique(tasks: list[Task], origin: str) -> list[Task]:
    """Return `tasks` unchanged, or raise `DataError` if two of them have the same id."""
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        if task.id in seen:
            raise DataError(
                f"tasks[{index}].id", task.id, f"is also the id of task {seen[task.id]} ({origin})", "Leave ids out to number them."
            )
        seen[task.id] = index
    return tasks
