"""A run on virtual time: the flow itself, with engines, environments and a learner that only take time.

Slots, queue, loops, ledger and pool are those of a real run. What is scripted is how long things take: an engine decodes
for all its sequences in steps whose length grows with their number, an environment takes the time it is drawn to take, and
the learner takes what its model says. Thousands of engines fit into one process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from agentrl.core.callbacks import Event, GroupJudged, StepEnd
from agentrl.core.errors import ConfigError
from agentrl.core.manifest import FileEntry
from agentrl.core.protocols import Membership, TrainResult, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Task
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.flow.sizes import FlowPlan
from agentrl.flow.worker_slots import Supervision
from tests.simulated_engine import Draw, DrawGroup, EngineModel, EpisodeShape, SimulatedWorker, World

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerModel:
    """Speed of the learner: a step takes ``(step_s + token_s * tokens / ranks) * noise + overhead_s``.

    Attributes:
        step_s: Seconds of a step that do not depend on its tokens.
        token_s: Seconds that one rank needs for a sampled token.
        ranks: Data-parallel ranks, which share a step's tokens.
        noise: A factor, 1 on average.
        overhead_s: Seconds around each step in which the learner is waited for and does not train.
        export_s: Seconds to make the weights available.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    ranks: int = 1
    noise: Draw = lambda rng: 1.0
    overhead_s: float = 0.0
    export_s: Draw = lambda rng: 0.0

    def train_s(self, tokens: float) -> float:
        """Seconds that a step of so many tokens takes on average."""
        return self.step_s + self.token_s * tokens / self.ranks


class SimulatedLearner:
    """See `agentrl.core.protocols.Learner`; groups are summaries."""

    def __init__(self, model: LearnerModel, seed: int = 0) -> None:
        self._model, self._rng = model, random.Random(f"{seed} learner")

    async def start(self) -> None:
        """Load nothing."""

    async def train(self, step: int, groups: Sequence[GroupSummary]) -> TrainResult:
        """Take the time of a step."""
        tokens = sum(member.num_tokens for group in groups for member in group.trainable)
        seconds = self._model.train_s(tokens) * self._model.noise(self._rng)
        await asyncio.sleep(seconds + self._model.overhead_s)
        return TrainResult(metrics={}, seconds=seconds)

    async def export_weights(self, version: int, members: Membership | None = None) -> WeightUpdate:
        """Take the time of an export."""
        await asyncio.sleep(self._model.export_s(self._rng))
        return WeightUpdate(version=version, transport="simulated")

    async def abandon_weights(self, reason: str) -> None:
        """Do nothing: no transfer is under way."""

    async def offload(self, *, keep_weights: bool) -> None:
        """Do nothing: no resource is held."""

    async def reload(self) -> None:
        """Do nothing: no weights were moved."""

    async def save_model(self, path: str) -> None:
        """Save nothing: there is no model."""

    async def save_checkpoint(self, path: str, step: int) -> None:
        """Save nothing: there is no state."""

    async def flush_checkpoint(self, path: str) -> dict[str, FileEntry]:
        """Return no files: none was written."""
        return {}

    async def map_files(self, work: Callable[..., T], files: Mapping[str, FileEntry], *arguments: Any) -> list[T]:
        """Call `work` once."""
        return [work(files, *arguments)]

    async def load_checkpoint(self, path: str) -> int:
        """Return step 0: no checkpoint was saved."""
        return 0

    async def close(self) -> None:
        """Do nothing: no resource is held."""


class _Jump(selectors.DefaultSelector):
    """Instead of waiting, moves the loop's clock; a wait for nothing at all is a deadlock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled and nobody is ready")
        self.now += max(0.0, timeout)
        # Files are still polled, because the loop wakes itself up through one.
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next thing that is due; code that takes the loop's time sees no difference."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run `func` here and now: a thread would take time that the clock does not know of."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` on virtual time, to its end.

    Args:
        main: Takes no arguments; what it waits for must be timers and what they set off, no files or threads.

    Returns:
        What `main` returns.

    Raises:
        RuntimeError: If everybody waits and no timer is left, which is a deadlock; or inside a running event loop.
    """
    return anyio.run(main, backend_options={"loop_factory": VirtualLoop})


def constant(value: float) -> Draw:
    """Always `value`."""
    return lambda rng: value


none = constant(0.0)
"""No time at all."""


def lognormal(median: float, sigma: float) -> Draw:
    """Lognormal with this median; `sigma` is the standard deviation of the logarithm."""
    return lambda rng: median * rng.lognormvariate(0.0, sigma)


def samples(values: Sequence[float]) -> Draw:
    """One of the recorded `values`, each as likely as any other.

    Raises:
        ValueError: If there are none.
    """
    if not values:
        raise ValueError("an empirical distribution needs at least one sample")
    recorded = tuple(values)
    return lambda rng: recorded[int(rng.random() * len(recorded))]


def episodes_of(*, tokens: Draw, env_s: Draw = none, reset_s: Draw = none, turns: int = 1, prompt: Draw = none) -> DrawGroup:
    """Groups of episodes that are independent of each other, with a fixed number of turns.

    Args:
        tokens: Tokens of a turn.
        env_s: Seconds of the environment after a turn.
        reset_s: Seconds of the environment before the first turn.
        turns: Turns of an episode.
        prompt: Tokens of the prompt, which the episodes of a group share.
    """

    def draw(rng: random.Random, size: int) -> list[EpisodeShape]:
        shared = prompt(rng)
        return [EpisodeShape(reset_s(rng), tuple((max(1.0, tokens(rng)), env_s(rng)) for _ in range(turns)), shared) for _ in range(size)]

    return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run to simulate.

    Attributes:
        settings: As for a real run; the stall time-out is in virtual seconds.
        num_engines: Engines, each with episodes beside it.
        engine: How fast an engine is.
        learner: How fast the learner is.
        episodes: What episodes ask for.
        pass_rate: Share of the groups that the filter keeps.
        failure_rate: Share of the episodes that fail at their end.
        seed: Of everything that is drawn.
    """

    settings: FlowPlan
    num_engines: int
    engine: EngineModel
    learner: LearnerModel
    episodes: DrawGroup
    pass_rate: float = 1.0
    failure_rate: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Simulated:
    """Result of a simulated run."""

    plan: Plan  # what was simulated
    result: RunResult  # as a real run returns it; its ledger was checked at the end
    steps: list[Mapping[str, float]]  # the metrics of every step, as a real run has them
    groups: list[tuple[float, GroupSummary]]  # when each attempt at a group ended, and its summary, if they were to be kept
    peak_episodes: int  # most episodes under way at once
    warmup: int  # steps left out of the figures below, because the run was filling up

    @property
    def step_s(self) -> float:
        """Seconds per step once the run is under way."""
        first = self.steps[self.warmup - 1]["time_s"] if self.warmup else 0.0
        return (self.steps[-1]["time_s"] - first) / (len(self.steps) - self.warmup)

    @property
    def episodes_per_s(self) -> float:
        """Episodes trained on per second once the run is under way."""
        return self.mean("group/count") * self.plan.settings.n_samples_per_prompt / self.step_s

    @property
    def max_staleness(self) -> float:
        """Largest staleness of a trained token, in steps."""
        return max(row["staleness/max"] for row in self.steps)

    def mean(self, name: str) -> float:
        """A metric's mean over the steps once the run is under way."""
        return statistics.fmean(row[name] for row in self.steps[self.warmup :])


@dataclass(slots=True)
class _Log:
    """The observer of a simulated run."""

    keep_groups: bool
    steps: list[Mapping[str, float]] = field(default_factory=list)
    groups: list[tuple[float, GroupSummary]] = field(default_factory=list)

    def on_stage(self, name: str) -> None:
        return

    async def notify(self, event: Event) -> None:
        if isinstance(event, StepEnd):
            self.steps.append(event.metrics)
        elif isinstance(event, GroupJudged) and self.keep_groups:
            self.groups.append((asyncio.get_running_loop().time(), event.summary))


def simulate(plan: Plan, *, keep_groups: bool = False) -> Simulated:
    """Simulate a whole run; the same plan gives the same result.

    Args:
        plan: What to simulate.
        keep_groups: Keep the summaries of all groups.

    Raises:
        ConfigError: If the plan has no engine or too few steps to say anything.
        AgentRLError: As a real run: a lost group, a token that is too old, too many failures.
    """
    if plan.num_engines < 1:
        raise ConfigError("num_engines", plan.num_engines, "a simulated run needs engines", "Give at least 1.")
    log, world = _Log(keep_groups), World(plan.episodes, plan.failure_rate, plan.seed, plan.num_engines)
    result = run_virtual(lambda: _run(plan, world, log))
    warmup = min(plan.settings.max_staleness + 1, len(log.steps) // 2)
    return Simulated(plan, result, log.steps, log.groups, world.peak_episodes, warmup)


async def _run(plan: Plan, world: World, log: _Log) -> RunResult:
    rng = random.Random(f"{plan.seed} filter")

    def keep(summary: GroupSummary) -> str | None:
        return None if plan.pass_rate >= 1.0 or rng.random() < plan.pass_rate else "simulated"

    workers = {f"engine-{i}": SimulatedWorker(plan.engine, world, number=i) for i in range(plan.num_engines)}
    supervision = None
    if plan.engine.lifetime_s is not None:

        async def respawn(name: str) -> SimulatedWorker:
            return await workers[name].successor()

        supervision = Supervision(respawn=respawn, max_restarts=1_000_000)
    learner = SimulatedLearner(plan.learner, plan.seed)
    pool = RolloutPool(workers, supervision)
    tasks = (Task("", id=str(number), position=number) for number in itertools.count())
    return await train(settings=plan.settings, pool=pool, learner=learner, tasks=tasks, observer=log, keep=keep)
