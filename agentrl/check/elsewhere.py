"""Tasks and episodes compared with those of a second process, which has another hash seed and another clock."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import pickle
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.check.context import Context, digest
from agentrl.check.determinism import compared, random_states, scripts_to_repeat
from agentrl.check.findings import CheckSettings
from agentrl.check.play import Player, make_player, repeating
from agentrl.check.probe import Watch
from agentrl.check.tokenizer import load_codec
from agentrl.core.differences import TurnValues
from agentrl.core.files import scratch_directory
from agentrl.env.agent_spec import preload
from agentrl.env.tasks import TaskSource
from agentrl.suites.load import load_agent
from agentrl.suites.registry import scheme_of

PEEK = 512
LIMIT_S = 60.0
HASH_SEEDS = ("101", "202")
CLOCK_S = 40 * 86400 + 7 * 3600 + 780.0
"""Another month, day of the week, hour and minute."""

CLOCKS = ("time", "monotonic", "perf_counter")

UNSTABLE = (
    "nondeterministic",
    "group-differs",
    "shared-state",
    "global-reseed",
    "tasks-single-use",
    "tasks-broken",
    "task-mutated",
    "changes-modules",
    "changes-signals",
)


async def check_elsewhere(context: Context, command: Sequence[str]) -> None:
    """Compare tasks and some episodes with those of a second process; `command` starts it, followed by the paths of request and answer."""
    if not command or scheme_of(context.settings.env).is_remote or context.report.has(*UNSTABLE) or context.left() < 1:
        return
    own_tasks = not context.settings.data.prompts and not context.report.has("tasks-unstable")
    scripts = [(task, actions) for task, actions in scripts_to_repeat(context) if task.id in context.originals]
    episodes = [(context.originals[task.id], actions) for task, actions in scripts]
    request = {"settings": context.settings, "episodes": episodes, "tasks": own_tasks}
    answer = await asyncio.to_thread(_ask, context, command, {**request, "clock_s": CLOCK_S}, HASH_SEEDS[0])
    if answer is None:
        return
    if answer["error"]:
        context.found("loads-only-here", "tasks", answer["error"])
        return
    seeds = {**answer["random"], "torch": ""}  # torch begins with the same seed in every process
    reseeded = [name for name, state in seeds.items() if state == context.after_import.get(name)]
    if reseeded:
        context.found("import-reseeds", "import", f"the state of {' and '.join(reseeded)} is the same in two processes")
    here = [(await context.player.play(task, repeating(actions))).values() for task, actions in scripts]
    if own_tasks and (tasks_differ := _tasks_differ(context, answer)):
        context.found("tasks-unstable", "tasks", f"{tasks_differ} in a process with another hash seed, at another time")
    elif seen := _first_difference(here, answer["episodes"]):
        # A third process with the right time and another hash seed tells the two causes apart.
        still = await asyncio.to_thread(_ask, context, command, {**request, "clock_s": 0.0}, HASH_SEEDS[1])
        at_fault = "hash-order" if still is not None and _first_difference(here, still["episodes"]) else "clock-dependent"
        context.found(at_fault, "step", seen)


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


def _first_difference(here: Sequence[Sequence[TurnValues]], there: Sequence[Mapping[str, Any]]) -> str:
    for values, episode in zip(here, there, strict=True):
        if episode["error"]:
            return f"there: {episode['error'][:200]}"
        if difference := compared(values, episode["values"], "{} here and {} there"):
            return difference[1]
    return ""


def _ask(context: Context, command: Sequence[str], request: Mapping[str, Any], hash_seed: str) -> dict[str, Any] | None:
    """The answer of a second process; `None`, and said so, if there is none."""
    limit = min(max(context.left(), 1.0), LIMIT_S)
    with scratch_directory() as folder:
        asked, told = folder / "request", folder / "answer"
        asked.write_bytes(pickle.dumps(request))
        words = [*command, str(asked), str(told)]
        # Python reads the hash seed only when it starts, so the second process cannot set it for itself.
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
        quiet = subprocess.DEVNULL
        try:
            subprocess.run(words, env=environ, stdin=quiet, stdout=quiet, stderr=quiet, timeout=limit, check=False)
            answer: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
            return answer
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            reason = f"no answer within {limit:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else "it ended without an answer"
            context.report.skipped.append(f"a second process with another hash seed: {reason}")
            return None


def answer(request: str, told: str) -> None:
    """Be the second process: read the file `request`, write the file `told`."""
    asked = pickle.loads(Path(request).read_bytes())
    # Before user code is imported, because `from time import time` binds the clock for good.
    if asked["clock_s"]:
        move_clock(asked["clock_s"])
    result: dict[str, Any] = {"error": "", "tasks": [], "episodes": [], "random": {}}
    try:
        settings: CheckSettings = asked["settings"]
        spec = load_agent(settings.env)
        preload(spec)
        result["random"] = random_states()
        if asked["tasks"]:
            result["tasks"] = [digest(task) for task in TaskSource.from_agent(spec, shuffle=False).first(PEEK)]
        player = make_player(settings, spec, load_codec(settings), Watch())
        # Not `asyncio.run`, whose end waits for threads of the environment that may hang.
        result["episodes"] = asyncio.new_event_loop().run_until_complete(_play_all(player, asked["episodes"]))
    # User code may raise anything, and the first process reports it.
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    Path(told).write_text(json.dumps(result), encoding="utf-8")


async def _play_all(player: Player, episodes: Sequence[tuple[bytes, list[str]]]) -> list[dict[str, Any]]:
    played = [await player.play(pickle.loads(task), repeating(actions)) for task, actions in episodes]
    return [{"error": str(episode.error or ""), "values": episode.values()} for episode in played]


def move_clock(seconds: float) -> None:
    """From now on every clock that Python code reads is ahead by so many seconds."""
    for name in CLOCKS:
        _move(name, seconds)
    real, date = datetime.datetime, datetime.date

    # Moments from before the move, and those that C code makes, are of the real class and must stay instances.
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
