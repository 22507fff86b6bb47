"""The same task, seed and actions give the same episode: twice, in any order, and beside another episode."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from agentrl.check.context import Context
from agentrl.check.findings import NO_TIME
from agentrl.check.play import CheckedEpisode, TextEpisode, repeating
from agentrl.check.policies import standard_policies
from agentrl.check.state import class_state, pickled, restore_class_state
from agentrl.core.differences import END, TurnValues, first_difference
from agentrl.core.types import Task

EPISODES = 4
SEED = 11
"""The first seed of the global random generators."""
ROUNDS = 10

Script: TypeAlias = tuple[Task, list[str]]
"""Task and actions of an episode to repeat."""
Play: TypeAlias = Callable[[], Awaitable[list[CheckedEpisode]]]


async def check_determinism(context: Context) -> None:
    """Play episodes again, and against each other."""
    torch = sys.modules.get("torch")
    saved = random.getstate(), np.random.get_state(), torch and torch.get_rng_state()
    try:
        for number, (task, actions) in enumerate(scripts_to_repeat(context)):
            if context.left(0.6) <= 0:
                context.report.skipped.append(f"determinism of some policies: {NO_TIME}")
                return
            await _check_script(context, number, task, actions)
        if not context.report.has("shared-state", "nondeterministic", "group-differs", "global-reseed"):
            await _check_interleaved(context)
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        if torch is not None:
            torch.set_rng_state(saved[2])


def scripts_to_repeat(context: Context) -> list[Script]:
    """Actions to repeat: of the longest episodes, and of each policy once."""
    scripts = [(played.task, played.actions) for played in context.good()]
    policies = len(standard_policies(context.cls, context.tasks, context.form))
    longest = sorted(scripts, key=lambda script: -len(script[1]))[:EPISODES]
    # Lists of actions cannot be hashed; a script that is in both selections is one object.
    return list({id(script): script for script in [*longest, *scripts[:policies]]}.values())


async def _check_script(context: Context, number: int, task: Task, actions: list[str]) -> None:
    first = next((played for played in context.good() if played.task is task and played.actions == actions), None)
    before, seeds = class_state(context), (SEED, SEED, SEED + 1 + number)  # others for each script: few draws show a rare difference
    (one, after_one), (two, _), (other, after_other) = [await _with_seed(context, task, actions, seed) for seed in seeds]
    after = class_state(context)
    original = context.originals.get(task.id)
    if original is not None and pickled(task) != original:
        context.found("task-mutated", "step", f"task {task.id!r} is not what it was after an episode")
        return
    if reseeded := [name for name in after_one if after_one[name] == after_other.get(name)]:
        seen = f"the state of {' and '.join(reseeded)} after an episode does not depend on the state before"
        context.found("global-reseed", "reset", seen)
        return
    changed = [name for name, value in after.items() if before.get(name, value) != value]
    compared_with = {"played twice": two, "played with another state of the global random generators": other}
    compared_with |= {} if first is None else {"played again after other episodes": first}
    differences = ((difference, how) for how, played in compared_with.items() if (difference := _difference(played, one)))
    if changed and (seen := await _follows_state(context, (task, actions), before, after)):
        context.found("shared-state", "step", f"{', '.join(changed)} changed, and {seen}")
    elif (first_found := next(differences, None)) is not None:
        (method, words), how = first_found
        context.found("group-differs" if method == "reset" else "nondeterministic", method, f"{how}, {words}")
    elif changed:
        context.found("class-state", "step", ", ".join(changed))


async def _follows_state(context: Context, script: Script, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """Return how the episode differs with other values in classes and modules, those of the beginning first; "" if it does not."""

    async def with_state(state: Mapping[str, bytes]) -> list[CheckedEpisode]:
        restore_class_state(context, state)
        return [await _replay(context, *script)]

    for earlier in (context.class_state, before):
        if seen := await _reproduced(partial(with_state, earlier), partial(with_state, after)):
            return seen
    return ""


async def _reproduced(one: Play, other: Play) -> str:
    """Return how two ways to play differ if they do so in each of several rounds, as they would not by chance; else ""."""
    first: list[CheckedEpisode] = []
    difference = None
    for number in range(ROUNDS):
        episodes = []
        for play in (one, other):
            seed_globals(SEED + number)
            episodes.append(await play())
        both = [*episodes[0], *episodes[1]]
        first = first or both
        difference = next(filter(None, map(_difference, *episodes)), None)
        # Each round has its own seed, so an episode that draws from the global generators differs from its first round.
        # Such a difference says nothing about shared state.
        if difference is None or any(map(_difference, first, both)):
            return ""
    return difference[1] if difference else ""


async def _check_interleaved(context: Context) -> None:
    """Compare two episodes that take turns with the same two one after the other."""
    if hasattr(context.cls, "make_vector"):  # a step of one waits for a step of the other, which comes after it here
        context.report.skipped.append("episodes in turns: those on a vector environment take their steps together")
        return
    for first, second in _pairs(context):
        if context.left(0.6) <= 0:
            context.report.skipped.append(f"some pairs of episodes side by side: {NO_TIME}")
            return

        if seen := await _reproduced(partial(_separate, context, first, second), partial(_both, context, first, second)):
            context.found("shared-state", "step", f"beside another episode {seen}")
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


async def _separate(context: Context, *scripts: Script) -> list[CheckedEpisode]:
    return [await _replay(context, *script) for script in scripts]


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


async def _with_seed(context: Context, task: Task, actions: list[str], seed: int) -> tuple[CheckedEpisode, dict[str, str]]:
    """An episode that begins with given global random states, and the states after it."""
    seed_globals(seed)
    return await _replay(context, task, actions), random_states()


def seed_globals(seed: int) -> None:
    """Seed the global random generators: Python's, numpy's, and torch's if it is loaded."""
    random.seed(seed)
    np.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def _difference(one: CheckedEpisode, two: CheckedEpisode) -> tuple[str, str] | None:
    """Return the method at which two episodes differ, ``reset`` or ``step``, and a description."""
    return compared(one.values(), two.values(), "{} and then {}")


def compared(one: Sequence[TurnValues], two: Sequence[TurnValues], both: str) -> tuple[str, str] | None:
    """Return the method and a description, in which `both` names the two values, of the first difference; `None` if there is none."""
    difference = first_difference(one, two, show=short)
    if difference is None:
        return None
    if difference.what == END:
        return "step", f"it took {both.format(len(one) - 1, len(two) - 1)} turns"
    values = both.format(difference.expected, difference.got)
    if difference.turn == 0:
        return "reset", f"reset said {values}"
    return "step", f"{difference.what} of turn {difference.turn - 1} was {values}"


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def random_states() -> dict[str, str]:
    """Digests of the states of the global random generators: Python's, numpy's, and torch's if it is loaded."""
    states = {"random": repr(random.getstate()).encode(), "numpy.random": pickle.dumps(np.random.get_state())}
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return {name: hashlib.blake2b(state).hexdigest() for name, state in states.items()}
