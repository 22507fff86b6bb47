"""What environments in processes of their own cost, next to environments in the rollout worker.

python -m tests.benchmarks.isolation_cost [EPISODES]

Each of the concurrent episodes takes a step at times of its own, spread evenly, so that two cores are not the limit and
latency is that of a machine which has time. Latency: from the call of `step` until its result is there. CPU of the driver:
of this process over the paced part, less what the pacing itself takes, which is measured with steps that do nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agentrl import StepState, Task
from agentrl.core.types import Sampling
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.pool import ProcessPool, Sessions, open_sessions
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.session import Session
from agentrl.env.states import make_sampling_params, make_step_state
from agentrl.suites.load import load_agent

ENV = """
from agentrl import AgentInstance, StepResult

class Plain(AgentInstance):
    def step(self, state):
        return StepResult(0.5, "Go on: " + "x" * 200, info={"turn": state.turn})

class Coroutine(AgentInstance):
    async def step(self, state):
        return StepResult(0.5, "Go on: " + "x" * 200, info={"turn": state.turn})
"""
EPISODES = 256
STEPS = 3
PERIOD_S = 4.0
"""Seconds between two steps of an episode."""
TEXT = "a word or two " * 300
MIB = 2**20


@dataclass
class Figures:
    """Milliseconds."""

    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    closes: list[float] = field(default_factory=list)
    driver_cpu: float = 0.0


def state(turn: int) -> StepState:
    return make_step_state(
        task=Task("prompt", label="label", id="t"),
        agent="",
        turn=turn,
        turns_left=0,
        observation_text=TEXT,
        action_text="an answer",
        finish_reason="stop",
        sampling_params=make_sampling_params(Sampling()),
    )


async def timed(call: Awaitable[object], into: list[float]) -> None:
    start = time.perf_counter()
    await call
    into.append((time.perf_counter() - start) * 1e3)


async def paced(episodes: int, step: Callable[[int, int], Awaitable[None]]) -> float:
    """Have every episode take its steps; milliseconds of CPU of this process per step."""
    begin, start = time.process_time(), time.perf_counter()

    async def play(index: int) -> None:
        for turn in range(STEPS):
            due = start + (turn + index / episodes) * PERIOD_S
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            await step(index, turn)

    await asyncio.gather(*(play(index) for index in range(episodes)))
    return (time.process_time() - begin) * 1e3 / (episodes * STEPS)


async def measure(sessions: Sessions, episodes: int) -> tuple[Figures, list[Session]]:
    figures = Figures()
    task = Task("prompt", label="label", id="task")
    live = [sessions.session() for _ in range(episodes)]

    async def nothing(index: int, turn: int) -> None:
        state(turn)

    async def step(index: int, turn: int) -> None:
        await timed(live[index].step(state(turn)), figures.steps)

    for session in live:
        await timed(session.reset(task, 1), figures.resets)
        await asyncio.sleep(0.03)
    base = await paced(episodes, nothing)
    figures.driver_cpu = await paced(episodes, step) - base
    return figures, live


def memory(pool: ProcessPool) -> str:
    """Proportional set sizes of the fork server and of the processes of the episodes."""
    assert pool._fork_server is not None
    server = psutil.Process(pool._fork_server.pid)
    children = [child.memory_full_info().pss / MIB for child in server.children()]
    total = (server.memory_full_info().pss / MIB) + sum(children)
    return f"{len(children)} processes, PSS median {statistics.median(children):.1f} MiB each, {total:.0f} MiB with the fork server"


def show(name: str, values: list[float]) -> str:
    ordered = sorted(values)
    return f"{name} p50 {statistics.median(ordered):6.2f} ms, p99 {ordered[int(len(ordered) * 0.99)]:6.2f} ms"


async def run(folder: Path, episodes: int) -> None:
    for name in ("Plain", "Coroutine"):
        agent = load_agent(f"{folder / 'env.py'}:{name}")
        for kind, process in (("none", None), ("process", ProcessLimits())):
            sessions = open_sessions(agent, EnvLimits(process=process))
            start = time.perf_counter()
            await sessions.start()
            started = time.perf_counter() - start
            await asyncio.sleep(1.0)
            figures, live = await measure(sessions, episodes)
            print(f"{name:9s} {kind:7s} start {started:5.2f} s; {show('reset', figures.resets)}; {show('step', figures.steps)}; ", end="")
            print(f"driver CPU {figures.driver_cpu:.3f} ms per step")
            if isinstance(sessions, ProcessPool):
                print(f"  {memory(sessions)}")
            start = time.perf_counter()
            await asyncio.gather(*(timed(session.close(), figures.closes) for session in live))
            wall = time.perf_counter() - start
            print(f"  {episodes} closed at once in {wall:.2f} s")
            start, cpu = time.perf_counter(), time.process_time()
            await burst(sessions, episodes)
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            print(f"  {episodes} episodes of one step at once: {wall:.2f} s, driver CPU {cpu:.2f} s")
            await sessions.close()


async def burst(sessions: Sessions, episodes: int) -> None:
    async def play() -> None:
        session = sessions.session()
        await session.reset(Task("prompt", label="label", id="task"), 1)
        await session.step(state(0))
        await session.close()

    await asyncio.gather(*(play() for _ in range(episodes)))


def main() -> None:
    """Print a block per kind of environment and place."""
    episodes = int(sys.argv[1]) if len(sys.argv) > 1 else EPISODES
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "env.py").write_text(ENV)
        asyncio.run(run(Path(folder), episodes))


if __name__ == "__main__":
    main()
