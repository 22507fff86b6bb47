"""The tasks: some, usable, the same each time, different from each other."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable
from typing import Any

from agentrl.check.context import Context, digest
from agentrl.check.state import class_state, pickled
from agentrl.core.errors import DataError
from agentrl.core.types import Task
from agentrl.env.prompts import read_prompts
from agentrl.env.tasks import TaskSource
from agentrl.rollout.tasks import prompt_format

PEEK = 512
MAX_CHECKED = 64


def read_tasks(context: Context) -> None:
    """Fill in the context's tasks, and check them.

    Raises:
        ConfigError: If there are none and ``--prompts`` is not given, or the data set cannot be read.
    """
    prompts = context.settings.data
    if prompts.prompts:
        source = TaskSource.from_prompts(read_prompts(prompts.prompt_sources, prompt_format(prompts)), shuffle=False)
        loaded = source.first(PEEK)
        context.report.env["tasks"] = source.num_tasks
    else:
        loaded = _own_tasks(context)
    context.tasks, context.class_state = loaded, class_state(context)
    if loaded:
        _say_unchecked(context, loaded)
        _check_pickle(context, loaded[:MAX_CHECKED])
        if context.report.env["tasks"] is not None:  # an endless supply may well repeat itself
            _check_copies(context, loaded)
        context.originals = {task.id: data for task in loaded if (data := pickled(task)) is not None}


def _say_unchecked(context: Context, tasks: list[Task]) -> None:
    """Report what the class of a suite says that these tasks leave unchecked."""
    left_unchecked = getattr(context.cls, "left_unchecked", None)
    if callable(left_unchecked) and (said := left_unchecked(tasks)):
        context.report.skipped.append(str(said))


def _own_tasks(context: Context) -> list[Task]:
    """The first of the environment's own tasks."""
    with context.watch.holding("tasks"):
        first = _call(context)
        again = _call(context)
    if first is not None and again is not None:
        _compare(context, first, again)
    if first == []:
        context.found("tasks-empty", "tasks", "tasks() gave none")
        return []
    try:
        with context.watch.holding("tasks"):
            source = TaskSource.from_agent(context.spec, shuffle=False)
            tasks = source.first(PEEK)
    except DataError as error:
        if not context.report.has("tasks-single-use"):
            context.found("tasks-broken", "tasks", f"{error.field}: {error.problem}")
        return [task for task in first or () if isinstance(task, Task) and task.id] if context.report.has("tasks-single-use") else []
    context.report.env["tasks"] = source.num_tasks
    return tasks


def _call(context: Context) -> list[Any] | None:
    """Return the first tasks of one call of tasks(), `None` if the call fails; another check reports the reason."""
    tasks = getattr(context.cls, "tasks", None)
    try:
        loaded = tasks() if callable(tasks) else tasks
        return list(itertools.islice(loaded, PEEK)) if isinstance(loaded, Iterable) else None
    except Exception:
        return None


def _compare(context: Context, first: list[Any], again: list[Any]) -> None:
    if first and not again:
        context.found("tasks-single-use", "tasks", f"the first call gave {len(first)}, the second none")
        return
    differ = [index for index, (one, two) in enumerate(itertools.zip_longest(first, again)) if digest(one) != digest(two)]
    if differ:
        seen = f"{len(differ)} of the first {len(first)} differ in a second call; the first is number {differ[0]}"
        context.found("tasks-unstable", "tasks", seen)


def _check_pickle(context: Context, tasks: list[Task]) -> None:
    for task in tasks:
        try:
            pickle.loads(pickle.dumps(task))
        except Exception as error:
            context.found("task-not-picklable", "tasks", f"task {task.id!r}: {type(error).__name__}: {error}")


def _check_copies(context: Context, tasks: list[Task]) -> None:
    seen: dict[Any, str] = {}
    copies: list[tuple[str, str]] = []
    for task in tasks:
        key = digest(task)
        if key in seen:
            copies.append((task.id, seen[key]))
        seen.setdefault(key, task.id)
    if copies:
        one, other = copies[0]
        context.found("tasks-duplicate", "tasks", f"{len(copies)} of {len(tasks)} are copies; task {one!r} is the same as {other!r}")
