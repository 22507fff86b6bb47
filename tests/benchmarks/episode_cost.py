"""What an episode itself costs: many at once, in an asynchronous environment that only waits, on an engine that answers at once.

python -m tests.benchmarks.episode_cost [EPISODES] [--step-s SECONDS] [--workers N]

Time is measured twice: by the wall clock, and by a clock that counts the CPU time of the event loop's thread and the waiting of
the event loop, which is what the wall clock shows if that thread has a core of its own; other programs do not disturb it.
`--step-s` has every step take the same time. `--workers` shares the episodes over processes, of which the slowest one's time is
shown, and the mean CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import selectors
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl import AgentInstance, ResetResult, ResetState, StepResult, StepState
from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import Group, GroupRequest, Task
from agentrl.env.agent_spec import AgentSpec
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_class
from tests.scripted_engine import ScriptedEngine

TURNS, GROUP = 5, 8
MEDIAN_S, SIGMA = 0.05, 1.2


AGENT = AgentSpec("tests.benchmarks.episode_cost:Waiting", "", "Waiting", __file__, load_class)


class Waiting(AgentInstance):
    """Takes its time over every step, as said beforehand."""

    script: ClassVar[deque[list[float]]]
    hold: ClassVar[Callable[[], Coroutine[Any, Any, None]] | None] = None

    async def reset(self, state: ResetState) -> ResetResult:
        self.waits = self.script.popleft()
        return ResetResult(f"You are in a room with two doors, {self.waits[0]:.6f} and {self.waits[1]:.6f}. What do you do?")

    async def step(self, state: StepState) -> StepResult:
        if state.turn == TURNS - 1:
            if self.hold is not None:
                await self.hold()
            await asyncio.sleep(self.waits[state.turn])
            return StepResult(1.0, terminated=True)
        await asyncio.sleep(self.waits[state.turn])
        return StepResult(0.0, f"Door {self.waits[0]:.6f} leads to room {state.turn + 2} with two doors.", info={"rooms": 1.0})


class _Skip(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Does not wait for a time, but says that it has passed."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout is None:
            return ready or super().select(60.0)
        self.skipped += max(0.0, timeout)
        return ready


class CpuLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock counts CPU time of its thread, and waiting, which takes no time."""

    def __init__(self) -> None:
        self._skip = _Skip()
        super().__init__(self._skip)

    def time(self) -> float:
        return time.thread_time() + self._skip.skipped


@dataclass(frozen=True)
class Cost:
    """One run.

    Attributes:
        seconds: From the first reset to the last trajectory, by the event loop's clock.
        bound_s: The longest episode's own waiting; with no other work at all the run would take as long.
        cpu_ms: CPU of the process, all threads, per step of the environment.
    """

    seconds: float
    bound_s: float
    cpu_ms: float


async def _started(waits: list[list[float]]) -> tuple[EpisodeWorker, list[GroupRequest]]:
    AGENT.load().script = deque(waits)
    codec = ChatCodec(load_tokenizer(str(tiny_model_path())))
    answer = codec.encode_text('{"action": "open", "door": "left"} I take the left door.<|end|>')
    engine = ScriptedEngine(answer=lambda request: answer, max_model_len=2048, requests=deque(maxlen=1))  # type: ignore[arg-type]
    settings = changed(EpisodePlan(), model=str(tiny_model_path()), max_new_tokens=64)
    worker = EpisodeWorker(engine, AGENT, settings)
    await worker.start()
    tasks = [Task("Find the way out.", id=str(number)) for number in range(len(waits) // GROUP)]
    return worker, [GroupRequest(group_id=number, task=task, n_samples_per_prompt=GROUP, version=0) for number, task in enumerate(tasks)]


def run(num_episodes: int, loop: Callable[[], asyncio.AbstractEventLoop] = CpuLoop, step_s: float = 0.0) -> Cost:
    """Play that many episodes at once, in groups of 8, every wait drawn from a lognormal distribution.

    Args:
        num_episodes: A multiple of 8.
        loop: The event loop whose clock is used.
        step_s: Seconds of every step; 0: lognormal.
    """
    rng = random.Random(0)
    waits = [[step_s or MEDIAN_S * rng.lognormvariate(0.0, SIGMA) for _ in range(TURNS)] for _ in range(num_episodes)]

    async def main() -> Cost:
        worker, group_requests = await _started(waits)
        try:
            gc.collect()
            now = asyncio.get_running_loop().time
            start, cpu = now(), time.process_time()
            groups = await asyncio.gather(*map(worker.run_group, group_requests))
            seconds, cpu = now() - start, time.process_time() - cpu
        finally:
            await worker.close()
        _check([group for _, group in groups])
        return Cost(seconds, max(map(sum, waits)), cpu / (num_episodes * TURNS) * 1e3)

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main())


def memory(num_episodes: int) -> tuple[float, float]:
    """KiB that a live episode takes before its last step is answered: beside its tokens, and its tokens' arrays."""

    async def main() -> tuple[float, float]:
        arrived, release, everyone = 0, asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            nonlocal arrived
            arrived += 1
            if arrived == num_episodes:
                everyone.set()
            await release.wait()

        worker, group_requests = await _started([[0.0] * TURNS for _ in range(num_episodes)])
        AGENT.load().hold = staticmethod(hold)
        try:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            running = asyncio.gather(*map(worker.run_group, group_requests))
            await everyone.wait()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            release.set()
            groups = [group for _, group in await running]
        finally:
            AGENT.load().hold = None
            await worker.close()
        tokens = sum(
            array.nbytes
            for group in groups
            for trajectory in group.trajectories
            for turn in trajectory.turns
            for array in (turn.prompt_ids, turn.token_ids, turn.logprobs, turn.versions)
        )
        return (after - before - tokens) / num_episodes / 1024, tokens / num_episodes / 1024

    tracemalloc.start()
    try:
        return asyncio.run(main())
    finally:
        tracemalloc.stop()


def _check(groups: list[Group]) -> None:
    for group in groups:
        for trajectory in group.trajectories:
            assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("finished", 1.0, TURNS), trajectory.error


def shared(num_episodes: int, workers: int, step_s: float) -> Cost:
    """Play the episodes in several processes at once: the slowest one's time, and the sum of their CPU."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        costs = pool.starmap(run, [(num_episodes // workers, CpuLoop, step_s)] * workers, chunksize=1)
    slowest = max(costs, key=lambda cost: cost.seconds)
    return Cost(slowest.seconds, slowest.bound_s, sum(cost.cpu_ms for cost in costs) / workers)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episodes", nargs="?", type=int, default=1000)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds of every step; 0: lognormal")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the episodes")
    args = parser.parse_args()
    latency = f"of {args.step_s:g} s" if args.step_s else f"lognormal with median {MEDIAN_S * 1e3:g} ms and sigma {SIGMA:g}"
    print(f"{args.episodes} episodes of {TURNS} turns at once, latency {latency}")
    if args.workers == 1:
        wall = run(args.episodes, asyncio.SelectorEventLoop, args.step_s)
        print(f"time by the wall clock: {wall.seconds:.2f} s, {wall.seconds / wall.bound_s:.3f} of the bound")
    cost = run(args.episodes, step_s=args.step_s) if args.workers == 1 else shared(args.episodes, args.workers, args.step_s)
    where = "a core of its own" if args.workers == 1 else f"{args.workers} cores, a process on each"
    print(f"time on {where}: {cost.seconds:.2f} s, {cost.seconds / cost.bound_s:.3f} of the bound of {cost.bound_s:.2f} s")
    cpu_ms = wall.cpu_ms if args.workers == 1 else cost.cpu_ms
    print(f"CPU per step of an environment: {cpu_ms:.3f} ms")
    if args.workers == 1 and not args.step_s:
        beside, tokens = memory(args.episodes)
        print(f"memory per live episode: {beside:.1f} KiB beside {tokens:.1f} KiB of tokens")


if __name__ == "__main__":
    main()
