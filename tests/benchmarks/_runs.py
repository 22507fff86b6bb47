"""Whole training runs in this process, one after the other, so that imports are paid for once."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.cluster.runtime import make_runtime
from agentrl.core.callbacks import Event, GroupJudged, StepEnd
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import GroupRequest
from agentrl.env.tasks import TaskSource
from agentrl.flow.driver import RunResult, train
from agentrl.flow.pool import RolloutPool
from agentrl.resolve.commands import load_config
from agentrl.resolve.parts import cluster_plan, flow_plan
from agentrl.rollout.tasks import open_tasks
from agentrl.suites.load import load_agent

ROOT = Path(__file__).parents[2]
ARITHMETIC = ROOT / "envs" / "arithmetic.py"

Row = Mapping[str, float]


@dataclass
class Rows:
    """An observer that keeps the metrics of every step."""

    steps: list[Row] = field(default_factory=list)
    groups: list[GroupSummary] = field(default_factory=list)

    def on_stage(self, name: str) -> None:
        return

    async def notify(self, event: Event) -> None:
        if isinstance(event, GroupJudged):
            self.groups.append(event.summary)
        elif isinstance(event, StepEnd):
            self.steps.append(dict(event.metrics))


@dataclass(frozen=True)
class Trained:
    """What one run left.

    Attributes:
        steps: Metrics, one row per step.
        groups: Every finished attempt at a group.
        result: How it ended.
        seconds: Time without start-up and without the evaluation at the end.
        evaluation: Mean reward of the final weights over all tasks, sampled; NaN if not asked for.
    """

    steps: list[Row]
    groups: list[GroupSummary]
    result: RunResult
    seconds: float
    evaluation: float

    def column(self, name: str) -> list[float]:
        """One metric over the steps that have it."""
        return [row[name] for row in self.steps if name in row]


def run(flags: Sequence[str], agent: Path = ARITHMETIC, *, evaluate: int = 0) -> Trained:
    """Train with the bundled model in this process.

    Args:
        flags: As for ``agentrl train``.
        agent: File of the environment.
        evaluate: Episodes per task with the final weights, after training.
    """
    return asyncio.run(_run(flags, agent, evaluate))


async def _run(flags: Sequence[str], agent: Path, evaluate: int) -> Trained:
    config = load_config(["--agent", str(agent), "--runtime", "local", "--record", "none", *flags])
    rows = Rows()
    runtime = make_runtime(cluster_plan(config), rows.on_stage)
    try:
        await runtime.start()
        tasks = open_tasks(config.data, load_agent(config.run.agent), seed=config.run.seed)
        pool = RolloutPool({"engine-0": runtime.workers[0]})
        start = time.perf_counter()
        result = await train(
            settings=flow_plan(config),
            pool=pool,
            learner=runtime.learner,
            tasks=tasks,
            observer=rows,
            keep=flow_plan(config).group_filter(),
        )
        seconds = time.perf_counter() - start
        evaluation = await _evaluate(pool, tasks, result.steps, evaluate) if evaluate else math.nan
        return Trained(rows.steps, rows.groups, result, seconds, evaluation)
    finally:
        await runtime.close()


async def _evaluate(pool: RolloutPool, tasks: TaskSource, version: int, samples: int) -> float:
    """Mean reward over all tasks; ids and epoch are never those of a training episode, so neither are the seeds."""
    group_requests = [
        GroupRequest(group_id=-1 - i, task=replace(task, epoch=-1), n_samples_per_prompt=samples, version=version)
        for i, task in enumerate(tasks.first(tasks.num_tasks or 0))
    ]
    groups = await asyncio.gather(*(pool.run_group(group_request) for group_request in group_requests))
    return statistics.fmean(m.reward or 0.0 for summary, _ in groups for m in summary.trainable)
