"""The tasks: some, usable, the same each time, different from each other."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable
from typing import Any

from agentrl.check.context import Context, digest
from agentrl.check.determinism import pickled
from agentrl.check.findings import Rule, Severity
from agentrl.core.errors import DataError
from agentrl.core.types import Task
from agentrl.env.prompts import read_prompts
from agentrl.env.tasks import TaskSource
from agentrl.rollout.tasks import prompt_format

PEEK = 512
MAX_CHECKED = 64

RULES = (
    Rule(
        id="tasks-empty",
        severity=Severity.ERROR,
        title="there is no task",
        why="A run has nothing to ask.",
        remedy="Return at least one Task from tasks(), or give --prompts.",
        snippet='@classmethod\ndef tasks(cls):\n    return [Task("What is 3+4?", label="7")]',
    ),
    Rule(
        id="tasks-broken",
        severity=Severity.ERROR,
        title="the tasks cannot be used",
        why="A run ends when it draws such a task.",
        remedy="Return Task objects whose prompt is text or a list of messages with role and content, each with an id of its own or none.",
        snippet='return [Task(row["question"], label=row["answer"]) for row in rows]',
    ),
    Rule(
        id="tasks-single-use",
        severity=Severity.ERROR,
        title="the tasks can be read only once",
        why="There is nothing left for the second epoch, for a resumed run, or for evaluation.",
        remedy="Return a list, or make a new iterator in each call of tasks().",
        snippet="@classmethod\ndef tasks(cls):\n    return list(cls.make_tasks())  # not one iterator that is kept",
    ),
    Rule(
        id="tasks-unstable",
        severity=Severity.WARNING,
        title="tasks() gives other tasks in each call, or in each process",
        why="A run that is resumed goes on with other tasks, and no two runs can be compared.",
        remedy="Draw tasks from a generator with a seed of its own, and sort what comes from sets and folders.",
        snippet="rng = random.Random(0)\nreturn [make_task(rng) for _ in range(1000)]",
    ),
    Rule(
        id="tasks-duplicate",
        severity=Severity.WARNING,
        title="the same task is there several times",
        why="It is trained on more often than the others, and may be in the training and the evaluation set at once.",
        remedy="Remove the copies, or give tasks that only look the same a seed or metadata of their own.",
        snippet="return list({task.prompt: task for task in tasks}.values())",
    ),
    Rule(
        id="task-not-picklable",
        severity=Severity.ERROR,
        title="a task cannot be sent to another process",
        why="Episodes run in worker processes, and tasks travel there by pickle.",
        remedy="Keep plain values in label and metadata: text, numbers, lists, dictionaries. Make functions and connections in reset.",
        snippet='Task(prompt, metadata={"checker": "is_prime"})  # a name; reset looks the function up',
    ),
)


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
    context.tasks = loaded
    if loaded:
        _check_pickle(context, loaded[:MAX_CHECKED])
        if context.report.env["tasks"] is not None:  # an endless supply may well repeat itself
            _check_copies(context, loaded)
        context.originals = {task.id: data for task in loaded if (data := pickled(task)) is not None}


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
        context.found(
            "tasks-unstable", "tasks", f"{len(differ)} of the first {len(first)} differ in a second call; the first is number {differ[0]}"
        )


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
