"""The same task, seed and actions give the same episode: twice, in any order, and beside another episode."""

from __future__ import annotations

import asyncio
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np

from agentrl.check.context import Context
from agentrl.check.findings import Rule, Severity
from agentrl.check.play import CheckedEpisode, repeating
from agentrl.check.policies import standard_policies
from agentrl.core.types import Task

EPISODES = 4
PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, frozenset, tuple, deque)
STATES = (11, 22)

Script: TypeAlias = tuple[Task, list[str]]
"""Task and actions of an episode to repeat."""

RULES = (
    Rule(
        id="group-differs",
        severity=Severity.ERROR,
        title="reset begins another episode although task and seed are the same",
        why="The members of a group are compared with each other; if they are asked different things, the comparison is noise.",
        remedy="Draw everything from a generator that is seeded with state.seed.",
        snippet="def reset(self, state):\n    self.rng = random.Random(state.seed)",
    ),
    Rule(
        id="nondeterministic",
        severity=Severity.WARNING,
        title="the same task, seed and actions give different results",
        why="Rewards are noisy, recorded episodes cannot be replayed, and no two runs can be compared.",
        remedy="Draw everything from a generator that is seeded with state.seed; do not use the clock, or the global generator.",
        snippet="def reset(self, state):\n    self.rng = random.Random(state.seed)",
    ),
    Rule(
        id="global-reseed",
        severity=Severity.ERROR,
        title="the environment reseeds a global random generator",
        why="Every other episode of the process draws from the same generator: each reset repeats or disturbs their numbers.",
        remedy="Use a generator of the episode's own. If a library reseeds, run environments in processes of their own.",
        snippet="self.rng = random.Random(state.seed)  # not random.seed(state.seed)\nself.np_rng = numpy.random.default_rng(state.seed)",
    ),
    Rule(
        id="shared-state",
        severity=Severity.ERROR,
        title="episodes change each other",
        why="Many episodes run at once: what one writes into a class, a module or a default argument, the others read.",
        remedy="Keep the episode's state in attributes of self, set in reset.",
        snippet="def reset(self, state):\n    self.history = []  # not a list in the body of the class",
    ),
    Rule(
        id="class-state",
        severity=Severity.NOTE,
        title="an episode changes an attribute of the class or of its module",
        why="No effect was seen, as is right for a cache; with processes of their own, environments do not share it.",
        remedy="If it is meant for one episode, keep it in self.",
    ),
    Rule(
        id="task-mutated",
        severity=Severity.ERROR,
        title="the environment changes the task that it is given",
        why="The members of a group, and later epochs, share the task: the next episode sees what this one left.",
        remedy="Copy what is to be changed.",
        snippet="self.board = copy.deepcopy(state.label)",
    ),
)


async def check_determinism(context: Context) -> None:
    """Play episodes again, and against each other."""
    saved = random.getstate(), np.random.get_state()
    try:
        for task, actions in scripts_to_repeat(context):
            if context.left(0.6) <= 0:
                context.report.skipped.append("determinism of some policies: no time left")
                return
            await _check_script(context, task, actions, _first_time(context, task, actions))
        if not context.report.has("shared-state", "nondeterministic", "group-differs", "global-reseed"):
            await _check_interleaved(context)
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])


def _script(played: CheckedEpisode) -> Script:
    return played.task, played.actions


def scripts_to_repeat(context: Context) -> list[Script]:
    """Actions to repeat: of the longest episodes, and of each policy once."""
    scripts = list(map(_script, context.good()))
    policies = len(standard_policies(context.cls, context.tasks))
    longest = sorted(scripts, key=lambda script: -len(script[1]))[:EPISODES]
    return list({id(script): script for script in [*longest, *scripts[:policies]]}.values())


async def _check_script(context: Context, task: Task, actions: list[str], first: CheckedEpisode | None) -> None:
    state = _class_state(context)
    one, after_one = await _with_global_state(STATES[0], lambda: _replay(context, task, actions))
    two, _ = await _with_global_state(STATES[0], lambda: _replay(context, task, actions))
    other, after_other = await _with_global_state(STATES[1], lambda: _replay(context, task, actions))
    changed = [name for name, value in _class_state(context).items() if state.get(name, value) != value]
    original = context.originals.get(task.id)
    if original is not None and pickled(task) != original:
        context.found("task-mutated", "step", f"task {task.id!r} is not what it was after an episode")
        return
    differs = _difference(one, two)
    reseeded = [name for name in after_one if after_one[name] == after_other.get(name)]
    if reseeded:
        context.found(
            "global-reseed", "reset", f"the state of {' and '.join(reseeded)} after an episode does not depend on what it was before"
        )
    elif differs and changed:
        context.found("shared-state", "step", f"{', '.join(changed)} changed, and {differs[1]}")
    elif differs:
        context.found(*_random_finding(differs, "played twice"))
    elif found := _difference(one, other):
        context.found(*_random_finding(found, "played with another state of the global random generators"))
    elif first is not None and (found := _difference(first, one)):
        seen = f"played again after other episodes, {found[1]}"
        context.found("shared-state", "step", f"{', '.join(changed)} changed, and {seen}" if changed else seen)
    elif changed:
        context.found("class-state", "step", ", ".join(changed))


def _first_time(context: Context, task: Task, actions: Sequence[str]) -> CheckedEpisode | None:
    """The episode that a script repeats, as it was when few others had been played."""
    return next((played for played in context.good() if played.task is task and played.actions == actions), None)


async def _check_interleaved(context: Context) -> None:
    """Compare two episodes that take turns with the same two one after the other."""
    if hasattr(context.cls, "make_vector"):  # a step of one waits for a step of the other, which comes after it here
        context.report.skipped.append("episodes in turns: those on a vector environment take their steps together")
        return
    for first, second in _pairs(context):
        if context.left(0.6) <= 0:
            context.report.skipped.append("some pairs of episodes side by side: no time left")
            return
        separate = [await _replay(context, *script) for script in (first, second)]
        together = await _both(context, first, second)
        for lonely, beside in zip(separate, together, strict=True):
            found = _difference(lonely, beside)
            if found:
                context.found("shared-state", "step", f"beside another episode {found[1]}")
                return


def _pairs(context: Context) -> list[tuple[Script, Script]]:
    """Return two scripts of each policy, of different tasks if possible, whose episodes must not change each other."""
    pairs = []
    for name in dict.fromkeys(played.policy for played in context.good()):
        own = list({played.task.id: _script(played) for played in context.good() if played.policy == name}.values())
        pairs.append((own[0], own[1 % len(own)]))
    return pairs


class _Turns:
    """Lets an episode take one turn at a time."""

    def __init__(self) -> None:
        self._waits, self._may = asyncio.Event(), asyncio.Event()

    async def gate(self) -> None:
        """Wait for leave to take a turn."""
        self._waits.set()
        await self._may.wait()
        self._may.clear()

    async def next(self, playing: asyncio.Task[CheckedEpisode]) -> None:
        """Give leave, if it is waited for, and return when the episode asks again or is over."""
        if self._waits.is_set():
            self._waits.clear()
            self._may.set()
        asks = asyncio.create_task(self._waits.wait())
        await asyncio.wait({playing, asks}, return_when=asyncio.FIRST_COMPLETED)
        asks.cancel()


async def _both(context: Context, *scripts: Script) -> list[CheckedEpisode]:
    """Episodes that take their turns one after the other."""
    turns = [_Turns() for _ in scripts]
    episodes = [context.player.open(task, repeating(actions), gate=turn.gate) for (task, actions), turn in zip(scripts, turns, strict=True)]
    playing: list[asyncio.Task[CheckedEpisode]] = []
    try:
        for episode, turn in zip(episodes, turns, strict=True):
            playing.append(asyncio.create_task(episode.run()))
            await turn.next(playing[-1])
        while not all(task.done() for task in playing):
            for task, turn in zip(playing, turns, strict=True):
                if not task.done():
                    await turn.next(task)
    finally:
        for episode in episodes:
            await episode.close()
    return [episode.played for episode in episodes]


async def _replay(context: Context, task: Task, actions: list[str]) -> CheckedEpisode:
    return await context.player.play(task, repeating(actions))


async def _with_global_state(state: int, play: Callable[[], Any]) -> tuple[CheckedEpisode, dict[str, Any]]:
    """An episode that begins with given global random states, and the states after it."""
    random.seed(state)
    np.random.seed(state)
    played = await play()
    after: dict[str, Any] = {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}
    return played, after


def _difference(one: CheckedEpisode, two: CheckedEpisode) -> tuple[str, str] | None:
    """Return the method at which two episodes differ, ``reset`` or ``step``, and a description."""
    if one.first != two.first:
        return "reset", f"reset said {short(one.first)} and then {short(two.first)}"
    names = ("observation", "reward", "terminated", "truncated", "score")
    for turn, (before, after) in enumerate(zip_longest(one.steps(), two.steps())):
        if before is None or after is None:
            return "step", f"it ended in turn {min(len(one.turns), len(two.turns))} in one and not in the other"
        for name, a, b in zip(names, before, after, strict=True):
            if a != b:
                return "step", f"{name} of turn {turn} was {short(a)} and then {short(b)}"
    return None


def _random_finding(difference: tuple[str, str], how: str) -> tuple[str, str, str]:
    method, words = difference
    return ("group-differs" if method == "reset" else "nondeterministic"), method, f"{how}, {words}"


def _class_state(context: Context) -> dict[str, Any]:
    """Plain values in the bodies of the user's classes and of their modules, by name, pickled."""
    holders: dict[str, Any] = {
        cls.__name__: vars(cls) for cls in context.cls.__mro__ if not cls.__module__.startswith(("agentrl.", "builtins"))
    }
    module = sys.modules.get(context.cls.__module__)
    if module is not None and not module.__name__.startswith("agentrl."):
        holders[context.file] = vars(module)
    values = {
        f"{holder}.{name}": pickled(value)
        for holder, body in holders.items()
        for name, value in [*body.items(), *_defaults(body)]
        if not name.startswith("__") and isinstance(value, PLAIN)
    }
    return {name: value for name, value in values.items() if value is not None}


def _defaults(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Default values of the functions of a class or a module: there is one of each for all calls."""
    for name, value in list(body.items()):
        if isinstance(value, FunctionType):
            words = value.__code__.co_varnames[: value.__code__.co_argcount]
            values = value.__defaults__ or ()
            given = dict(zip(words[len(words) - len(values) :], values, strict=True)) | (value.__kwdefaults__ or {})
            yield from ((f"{name.strip('_')}({word}=)", default) for word, default in given.items())


def pickled(value: Any) -> bytes | None:
    """A value as bytes, to see whether it changes; `None` if it has no such form."""
    try:
        return pickle.dumps(value)
    except Exception:
        return None


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
