"""The same task, seed and actions give the same episode: twice, in any order, beside another episode, and in a second process.

The second process has another hash seed and another clock.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeAlias

import numpy as np

from agentrl.check.context import Context, digest
from agentrl.check.findings import CheckSettings
from agentrl.check.play import CheckedEpisode, Player, TextEpisode, make_player, repeating
from agentrl.check.policies import standard_policies
from agentrl.check.probe import Watch
from agentrl.check.tokenizer import load_codec
from agentrl.core.types import Task
from agentrl.env.load import load_agent
from agentrl.env.tasks import TaskSource

PEEK = 512
LIMIT_S = 60.0
HASH_SEEDS = ("101", "202")
CLOCK_S = 40 * 86400 + 7 * 3600 + 780.0
"""Another month, day of the week, hour and minute."""

CLOCKS = ("time", "monotonic", "perf_counter")
REMOTE = ("nemo-gym:", "openenv:", "reward:", "gem:", "textarena:")
"""Environments elsewhere, or whose packages take long to load."""

UNSTABLE = ("nondeterministic", "group-differs", "shared-state", "global-reseed", "tasks-single-use", "tasks-broken", "task-mutated")

EPISODES = 4
PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, frozenset, tuple, deque)
STATES = (11, 11, 22)
"""Seeds of the global random generators for three replays of one episode."""

Script: TypeAlias = tuple[Task, list[str]]
"""Task and actions of an episode to repeat."""


async def check_determinism(context: Context) -> None:
    """Play episodes again, and against each other."""
    saved = random.getstate(), np.random.get_state()
    try:
        for task, actions in _scripts_to_repeat(context):
            if context.left(0.6) <= 0:
                context.report.skipped.append("determinism of some policies: no time left")
                return
            await _check_script(context, task, actions)
        if not context.report.has("shared-state", "nondeterministic", "group-differs", "global-reseed"):
            await _check_interleaved(context)
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])


def _scripts_to_repeat(context: Context) -> list[Script]:
    """Actions to repeat: of the longest episodes, and of each policy once."""
    scripts = [(played.task, played.actions) for played in context.good()]
    policies = len(standard_policies(context.cls, context.tasks))
    longest = sorted(scripts, key=lambda script: -len(script[1]))[:EPISODES]
    return list({id(script): script for script in [*longest, *scripts[:policies]]}.values())


async def _check_script(context: Context, task: Task, actions: list[str]) -> None:
    first = next((played for played in context.good() if played.task is task and played.actions == actions), None)
    state = _class_state(context)
    (one, after_one), (two, _), (other, after_other) = [await _with_global_state(context, task, actions, state) for state in STATES]
    changed = [name for name, value in _class_state(context).items() if state.get(name, value) != value]
    original = context.originals.get(task.id)
    if original is not None and pickled(task) != original:
        context.found("task-mutated", "step", f"task {task.id!r} is not what it was after an episode")
        return
    differs = _difference(one, two)
    reseeded = [name for name in after_one if after_one[name] == after_other.get(name)]
    if reseeded:
        seen = f"the state of {' and '.join(reseeded)} after an episode does not depend on the state before"
        context.found("global-reseed", "reset", seen)
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
        own = list({played.task.id: (played.task, played.actions) for played in context.good() if played.policy == name}.values())
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
    pairs = zip(scripts, turns, strict=True)
    episodes = [TextEpisode(context.player, task, repeating(actions), gate=turn.gate) for (task, actions), turn in pairs]
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


async def _with_global_state(context: Context, task: Task, actions: list[str], state: int) -> tuple[CheckedEpisode, dict[str, str]]:
    """An episode that begins with given global random states, and the states after it."""
    random.seed(state)
    np.random.seed(state)
    return await _replay(context, task, actions), random_states()


def _difference(one: CheckedEpisode, two: CheckedEpisode) -> tuple[str, str] | None:
    """Return the method at which two episodes differ, ``reset`` or ``step``, and a description."""
    return _compared(_told(one), _told(two), "{} and then {}")


def _told(played: CheckedEpisode) -> dict[str, Any]:
    """An episode as JSON."""
    return {"error": str(played.error or ""), "first": played.first, "steps": [list(step) for step in played.steps()]}


def _compared(one: Mapping[str, Any], two: Mapping[str, Any], both: str) -> tuple[str, str] | None:
    if one["first"] != two["first"]:
        return "reset", "reset said " + both.format(short(one["first"]), short(two["first"]))
    for turn, (before, after) in enumerate(zip(one["steps"], two["steps"], strict=False)):
        for name, a, b in zip(("observation", "reward", "terminated", "truncated", "score"), before, after, strict=True):
            if a != b:
                return "step", f"{name} of turn {turn} was " + both.format(short(a), short(b))
    turns = len(one["steps"]), len(two["steps"])
    return None if turns[0] == turns[1] else ("step", f"it took {both.format(*turns)} turns")


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


async def check_elsewhere(context: Context, command: Sequence[str]) -> None:
    """Compare tasks and some episodes with those of a second process; `command` starts it, followed by the paths of request and answer."""
    if not command or context.settings.env.startswith(REMOTE) or context.report.has(*UNSTABLE) or context.left() < 1:
        return
    own_tasks = not context.settings.data.prompts and not context.report.has("tasks-unstable")
    scripts = [(task, actions) for task, actions in _scripts_to_repeat(context) if task.id in context.originals]
    request = {
        "settings": base64.b64encode(pickle.dumps(context.settings)).decode(),
        "episodes": [(base64.b64encode(context.originals[task.id]).decode(), actions) for task, actions in scripts],
        "tasks": own_tasks,
    }
    answer = await asyncio.to_thread(_ask, context, command, {**request, "clock_s": CLOCK_S}, HASH_SEEDS[0])
    if answer is None:
        return
    if answer["error"]:
        context.found("loads-only-here", "tasks", answer["error"])
        return
    reseeded = [name for name, state in answer["random"].items() if state == context.after_import.get(name)]
    if reseeded:
        context.found("import-reseeds", "import", f"the state of {' and '.join(reseeded)} is the same in two processes")
    here = [_told(await context.player.play(task, repeating(actions))) for task, actions in scripts]
    if own_tasks and (differ := _tasks_differ(context, answer)):
        context.found("tasks-unstable", "tasks", f"{differ} in a process with another hash seed, at another time")
    elif found := _first_difference(here, answer["episodes"]):
        still = await asyncio.to_thread(_ask, context, command, {**request, "clock_s": 0.0}, HASH_SEEDS[1])
        at_fault = "hash-order" if still is not None and _first_difference(here, still["episodes"]) else "clock-dependent"
        context.found(at_fault, "step", found)


def _tasks_differ(context: Context, answer: Mapping[str, Any]) -> str:
    """In words; empty if they do not."""
    here = list(map(digest, context.tasks))
    there = answer["tasks"]
    if here == there:
        return ""
    if sorted(here) == sorted(there):
        return "they come in another order"
    number = sum(one != two for one, two in zip(here, there, strict=False)) + abs(len(here) - len(there))
    return f"{number} of the first {len(here)} are others"


def _first_difference(here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]) -> str:
    for one, two in zip(here, there, strict=True):
        if two["error"]:
            return f"there: {two['error'][:200]}"
        if found := _compared(one, two, "{} here and {} there"):
            return found[1]
    return ""


def _ask(context: Context, command: Sequence[str], request: Mapping[str, Any], hash_seed: str) -> dict[str, Any] | None:
    """The answer of a second process; `None`, and said so, if there is none."""
    limit = min(max(context.left(), 1.0), LIMIT_S)
    with tempfile.TemporaryDirectory(prefix="agentrl-check-") as folder:
        asked, told = os.path.join(folder, "request"), os.path.join(folder, "answer")
        with open(asked, "w", encoding="utf-8") as file:
            json.dump(request, file)
        words = [*command, asked, told]
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        quiet = subprocess.DEVNULL
        try:
            subprocess.run(words, env=environ, stdin=quiet, stdout=quiet, stderr=quiet, timeout=limit, check=False)
            with open(told, encoding="utf-8") as file:
                answer: dict[str, Any] = json.load(file)
                return answer
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            reason = f"no answer within {limit:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else "it ended without an answer"
            context.report.skipped.append(f"a second process with another hash seed: {reason}")
            return None


def answer(request: str, told: str) -> None:
    """Be the second process: read the file `request`, write the file `told`."""
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    if asked["clock_s"]:
        move_clock(asked["clock_s"])
    result: dict[str, Any] = {"error": "", "tasks": [], "episodes": [], "random": {}}
    try:
        settings: CheckSettings = pickle.loads(base64.b64decode(asked["settings"]))
        spec = load_agent(settings.env)
        spec.load()
        result["random"] = random_states()
        if asked["tasks"]:
            result["tasks"] = [digest(task) for task in TaskSource.from_agent(spec, shuffle=False).first(PEEK)]
        player = make_player(settings, spec, load_codec(settings), Watch())
        result["episodes"] = asyncio.new_event_loop().run_until_complete(_play_all(player, asked["episodes"]))
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    with open(told, "w", encoding="utf-8") as file:
        json.dump(result, file)


async def _play_all(player: Player, episodes: Sequence[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    return [_told(await player.play(pickle.loads(base64.b64decode(task)), repeating(actions))) for task, actions in episodes]


def random_states() -> dict[str, str]:
    """Digests of the states of the global random generators."""
    states = {"random": repr(random.getstate()).encode(), "numpy.random": pickle.dumps(np.random.get_state())}
    return {name: hashlib.blake2b(state).hexdigest() for name, state in states.items()}


def move_clock(seconds: float) -> None:
    """From now on every clock that Python code reads is ahead by so many seconds."""
    for name in CLOCKS:
        _move(name, seconds)
    real, date = datetime.datetime, datetime.date

    class AnyMoment(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real if cls is Moved else date)

    class Moved(datetime.datetime, metaclass=AnyMoment):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            return super().utcnow() + datetime.timedelta(seconds=seconds)

        @classmethod
        def today(cls) -> Any:
            return super().today() + datetime.timedelta(seconds=seconds)

    class MovedDate(datetime.date, metaclass=AnyMoment):
        @classmethod
        def today(cls) -> Any:
            return super().today() + datetime.timedelta(seconds=seconds)

    datetime.datetime, datetime.date = Moved, MovedDate  # type: ignore[misc]


def _move(name: str, seconds: float) -> None:
    clock, clock_ns, offset = getattr(time, name), getattr(time, f"{name}_ns"), int(seconds * 1e9)
    setattr(time, name, lambda: clock() + seconds)
    setattr(time, f"{name}_ns", lambda: clock_ns() + offset)
