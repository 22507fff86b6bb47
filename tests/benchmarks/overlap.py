"""How much of generation and training runs at the same time, as a share of what is possible.

    python -m tests.benchmarks.overlap [real] [scripted] [latency] [--pairs N]
    python -m tests.benchmarks.overlap real --engine vllm --at-once 128

An asynchronous step takes at least max(t_gen, t_train), a synchronous one t_gen + t_train, so asynchrony can gain at most a
factor of (t_gen + t_train) / max(t_gen, t_train). What is printed is the gain and its share of that bound. Synchronous and
asynchronous stretches take turns in one and the same started run, and each is compared with its neighbour, because other
programs on the machine disturb both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.assets import tiny_model_path
from agentrl.cluster.runtime import make_runtime
from agentrl.config.model_defaults import settled_engine
from agentrl.config.sections import changed
from agentrl.core.protocols import EngineStats, GenerationRequest, Learner, WeightUpdate
from agentrl.core.types import Generation
from agentrl.engine.usage import UsageMeter
from agentrl.env.agent_spec import AgentSpec
from agentrl.flow.checkpoint import Progress
from agentrl.flow.driver import train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.sizes import FlowPlan
from agentrl.resolve.commands import load_config
from agentrl.resolve.parts import cluster_plan, flow_plan
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.tasks import open_tasks
from agentrl.rollout.worker import EpisodeWorker
from agentrl.suites.load import load_agent, load_class
from tests.benchmarks._runs import Rows
from tests.benchmarks.episode_cost import CpuLoop
from tests.scripted_engine import ScriptedEngine
from tests.unit.flow.fakes import ScriptedLearner, endless_tasks, flow_of

ENVIRONMENTS = Path(__file__).with_name("_environments.py")
SETTLING = 3  # first steps of a stretch that are not counted: the pipeline fills, the other mode's heat is gone

Row = Mapping[str, float]


@dataclass(frozen=True)
class Stretch:
    """Some steps in one mode.

    Attributes:
        max_staleness: 0 is synchronous.
        step_s: Wall time of a step.
        gen_s: Time of a step in which the engine had something to do.
        train_s: Time of a step in which the learner trained.
        publish_s: Time from the end of training until the engine confirmed the weights: export, then load.
        generator_idle: Share of the time in which the engine had nothing to do.
        learner_idle: Share of the time in which the learner did not train.
        episodes_per_s: Episodes trained on.
    """

    max_staleness: int
    step_s: float
    gen_s: float
    train_s: float
    publish_s: float
    generator_idle: float
    learner_idle: float
    episodes_per_s: float

    def describe(self) -> str:
        """One line."""
        mode = f"async S={self.max_staleness}" if self.max_staleness else "sync     "
        return (
            f"{mode}  step {self.step_s * 1e3:6.0f} ms = {self.episodes_per_s:6.1f} episodes/s;  t_gen {self.gen_s * 1e3:5.0f}  "
            f"t_train {self.train_s * 1e3:5.0f}  publication {self.publish_s * 1e3:4.0f} ms;  "
            f"idle: generator {self.generator_idle:4.0%}, learner {self.learner_idle:4.0%}"
        )


@dataclass(frozen=True)
class Pair:
    """A synchronous stretch and the asynchronous one after it."""

    sync: Stretch
    overlapped: Stretch

    @property
    def gain(self) -> float:
        """Asynchronous over synchronous throughput."""
        return self.sync.step_s / self.overlapped.step_s

    @property
    def bound(self) -> float:
        """The largest possible gain, by the parts of the synchronous step."""
        return (self.sync.gen_s + self.sync.train_s) / max(self.sync.gen_s, self.sync.train_s)

    @property
    def share(self) -> float:
        """Share of the bound that was reached."""
        return self.gain / self.bound


def stretch(settings: FlowPlan, rows: Sequence[Row]) -> Stretch:
    """Means over the steps between filling and draining the pipeline, given those with their metrics."""
    first, last = SETTLING + settings.max_staleness, len(rows) - 1 - settings.max_staleness
    counted = rows[first : last + 1]
    step_s = (rows[last]["time_s"] - rows[first - 1]["time_s"]) / len(counted)

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in counted)

    return Stretch(
        max_staleness=settings.max_staleness,
        step_s=step_s,
        gen_s=(1 - mean("idle/generator")) * step_s,
        train_s=mean("time/train_s"),
        publish_s=mean("publish/seconds") + mean("publish/export_s"),
        generator_idle=mean("idle/generator"),
        learner_idle=mean("idle/learner"),
        episodes_per_s=settings.flow.groups_per_step * settings.n_samples_per_prompt / step_s,
    )


# The real stack.


class Rig:
    """A started run that is trained on in stretches, synchronous or not; engine and learner have one core each.

    The engine is the one that ``agentrl train`` takes, unless the flags name another.

    Args:
        flags: As for ``agentrl train``; their staleness bound is for asynchronous stretches.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        config = load_config(["--runtime", "ray", "--record", "none", *flags])
        self.config = config if config.engine.engine != "auto" else changed(config, engine=settled_engine(config)[0])
        self._runtime = make_runtime(cluster_plan(self.config), lambda stage: None)
        self._tasks = iter(open_tasks(self.config.data, load_agent(self.config.run.agent), seed=self.config.run.seed))
        self._progress = Progress()

    async def start(self) -> None:
        """Start processes and pin them."""
        await self._runtime.start()
        self._pool = RolloutPool({"engine-0": self._runtime.workers[0]}, self._runtime.supervision)
        worker: Any = self._runtime.workers[0]
        learner: Any = self._runtime.learner
        for core, actor in zip(sorted(os.sched_getaffinity(0)), (worker.actor, learner.actors[0]), strict=False):
            pin(await actor.__ray_call__.remote(lambda _: os.getpid()), core)

    async def close(self) -> None:
        """End everything."""
        await self._runtime.close()

    async def run(self, max_staleness: int, num_steps: int) -> Stretch:
        """Train so many steps more."""
        begin, rows = self._progress, Rows()
        settings = changed(flow_plan(self.config), max_staleness=max_staleness, num_steps=begin.step + num_steps)
        learner: Learner = self._runtime.learner
        result = await train(settings=settings, pool=self._pool, learner=learner, tasks=self._tasks, observer=rows, progress=begin)
        groups = result.counts.trained
        self._progress = Progress(step=result.steps, next_group_id=result.counts.submitted, trained=groups)
        return stretch(settings, rows.steps)


def pin(pid: int, core: int) -> None:
    """Have every thread of a process run on one core; threads that it starts later inherit that."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


async def measure(flags: Sequence[str], *, pairs: int, sync_steps: int, async_steps: int) -> list[Pair]:
    """Pairs of neighbouring stretches on the real stack, after a first one that is not counted."""
    rig = Rig(flags)
    try:
        await rig.start()
        await rig.run(rig.config.flow.staleness, 4 + 2 * rig.config.flow.staleness + SETTLING)
        found = []
        for _ in range(pairs):
            sync = await rig.run(0, sync_steps + SETTLING + 1)
            found.append(Pair(sync, await rig.run(rig.config.flow.staleness, async_steps + SETTLING + 2 * rig.config.flow.staleness + 1)))
            print(f"  {found[-1].sync.describe()}\n  {found[-1].overlapped.describe()}", flush=True)
        return found
    finally:
        await rig.close()


COMMON = ("--learning-rate", "1e-6", "--n-samples-per-prompt", "8")
"""The learning rate is so small that answers keep their length: what is measured is time, not learning."""
REAL = ("--agent", f"{ENVIRONMENTS}:Talk", *COMMON, "--async")
LATENCY = ("--agent", f"{ENVIRONMENTS}:SlowTalk", *COMMON, "--max-new-tokens", "16", "--groups-per-step", "8", "--max-staleness", "4")


def real(options: argparse.Namespace) -> None:
    """Print the share of the bound on the real stack."""
    sizes = f"{options.groups} groups of 8, {options.at_once or 'all'} episodes at once, turns of {options.tokens} tokens"
    print(f"real stack, one core each, engine {options.engine}, {sizes}, {options.passes} pass(es) over a batch, S = {options.staleness}:")
    flags = (*REAL, "--engine", options.engine, "--ppo-epochs", str(options.passes), "--groups-per-step", str(options.groups))
    flags += ("--max-new-tokens", str(options.tokens), "--max-staleness", str(options.staleness))
    flags += ("--max-concurrent-episodes", str(options.at_once))
    report(asyncio.run(measure(flags, pairs=options.pairs, sync_steps=10, async_steps=10)), target=0.93)


def latency(options: argparse.Namespace) -> None:
    """Print the gain where the environment takes a lognormal time."""
    print(f"real stack, engine {options.engine}, environment with lognormal latency, median 0.3 s, sigma 1:")
    flags = (*LATENCY, "--engine", options.engine)
    found = asyncio.run(measure(flags, pairs=options.pairs, sync_steps=10, async_steps=20))
    gains = sorted(pair.gain for pair in found)
    print(f"async over sync {statistics.median(gains):.2f} (median; {gains[0]:.2f} to {gains[-1]:.2f}), target 2.5\n", flush=True)


def report(pairs: Sequence[Pair], *, target: float) -> None:
    """Print the median and the range over the pairs."""
    shares = sorted(pair.share for pair in pairs)
    middle = sorted(pairs, key=lambda pair: pair.share)[len(pairs) // 2]
    ratio = statistics.median(pair.sync.gen_s / pair.sync.train_s for pair in pairs)
    print(
        f"t_gen is {ratio:.2f} of t_train; gain {middle.gain:.2f} of at most {middle.bound:.2f}; "
        f"share of the bound {statistics.median(shares):.3f} "
        f"(median of {len(shares)}; {shares[0]:.3f} to {shares[-1]:.3f}), target {target}\n",
        flush=True,
    )


# Scripted engine and learner.


class SeatedEngine(ScriptedEngine):
    """A scripted engine that works on so many requests at a time, and on none while it takes weights.

    Args:
        seats: Requests at a time.
        token_s: Seconds for a token.
        load_s: Seconds to take weights.
    """

    def __init__(self, *, seats: int, token_s: float, load_s: float) -> None:
        rng = random.Random(0)
        super().__init__(answer=lambda request: range(10, 10 + rng.randint(12, 16)), max_model_len=1024)
        self.requests = deque(maxlen=1)  # type: ignore[assignment]
        self._seats, self._open = asyncio.Semaphore(seats), asyncio.Lock()
        self._token_s, self._load_s = token_s, load_s
        self._meter = UsageMeter(asyncio.get_running_loop().time)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Wait for a seat, then for the tokens."""
        self._meter.begin(len(request.prompt_ids))
        try:
            async with self._seats:
                async with self._open:
                    pass
                generation = await super().generate(request)
                await asyncio.sleep(self._token_s * len(generation.token_ids))
                return generation
        finally:
            self._meter.end()

    async def load_weights(self, update: WeightUpdate) -> int:
        """Take a while, in which no request is begun."""
        async with self._open:
            self._meter.pause()
            await asyncio.sleep(self._load_s)
            self._meter.resume()
            return await super().load_weights(update)

    def stats(self) -> EngineStats:
        """By the event loop's clock."""
        return self._meter.stats()


async def scripted_stretch(max_staleness: int, train_s: float, num_steps: int) -> Stretch:
    """Real episodes, groups, slots and loops between a scripted engine and a scripted learner."""
    settings = flow_of(
        num_steps=num_steps + SETTLING + 2 * max_staleness + 1, groups_per_step=16, n_samples_per_prompt=8, max_staleness=max_staleness
    )
    engine = SeatedEngine(seats=16 * 8, token_s=0.01, load_s=0.03)
    agent = AgentSpec("tests.benchmarks._environments:Talk", "", "Talk", __file__, load_class)
    worker = EpisodeWorker(engine, agent, changed(EpisodePlan(), model=str(tiny_model_path()), max_new_tokens=16))
    await worker.start()
    rows = Rows()
    try:
        await train(
            settings=settings,
            pool=RolloutPool({"engine-0": worker}),
            learner=ScriptedLearner(train_s=lambda step: train_s),
            tasks=endless_tasks(),
            observer=rows,
        )
    finally:
        await worker.close()
    return stretch(settings, rows.steps)


def scripted(steps: int = 20) -> None:
    """Print the share of the bound with a scripted engine and learner, by a clock of this process's CPU and of waiting."""
    print("scripted engine and learner:")
    for train_s in (0.3, 0.6, 1.2):
        stretches = []
        for max_staleness in (0, 1):
            with asyncio.Runner(loop_factory=CpuLoop) as runner:
                stretches.append(runner.run(scripted_stretch(max_staleness, train_s, steps)))
        print(f"  {stretches[0].describe()}\n  {stretches[1].describe()}")
        report([Pair(*stretches)], target=0.9)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["real", "scripted", "latency", []], default=[], help="all of them if none is named")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--engine", default="auto", help="as for `agentrl train`")
    parser.add_argument("--at-once", type=int, default=48, help="episodes under way; 48 take about as long as training; 0: no limit")
    parser.add_argument("--passes", type=int, default=1, help="of the learner over a batch")
    parser.add_argument("--groups", type=int, default=64, help="groups of a step; in short steps publication weighs more")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer at most; the fewer, the less generation beside training")
    parser.add_argument("--staleness", type=int, default=1, help="of asynchronous stretches at most")
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
    for what in options.what or ("scripted", "real", "latency"):
        {
            "real": lambda: real(options),
            "latency": lambda: latency(options),
            "scripted": scripted,
        }[what]()
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
