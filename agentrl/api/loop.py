"""The parts of a training run, started and connected, for a loop of one's own; ``examples/loop.py`` is such a loop on one page.

`agentrl.train` is made of the same parts. Nothing heavy is imported before they are opened.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ConfigError
from agentrl.core.protocols import GroupRef, Learner, WeightUpdate
from agentrl.core.summaries import GroupSummary
from agentrl.core.types import Group, Task

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.config.schema import TrainConfig
    from agentrl.flow.pool import RolloutPool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedGroup:
    """The episodes of one task, played to their end.

    Attributes:
        summary: Everything about the group but its tokens: a status, a reward and lengths for each episode.
        episodes: What the learner is given: the group with its tokens, or the cluster's reference to it.
        kept: True if it may be trained on: enough of its episodes did not fail, and the filter of the settings keeps it.
    """

    summary: GroupSummary
    episodes: GroupRef
    kept: bool

    @property
    def reward(self) -> float:
        """Mean reward of the episodes that may be trained on; not a number if there are none, because a failure is no reward."""
        return fmean([member.reward for member in self.summary.trainable if member.reward is not None] or [nan])

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version of the weights that sampled a token to be trained on; only of a group that is `kept`.

        Raises:
            ValueError: If no token may be trained on.
        """
        if self.summary.versions is None:
            raise ValueError(f"group {self.summary.group_id} has no token to train on")
        return self.summary.versions


class Engines:
    """All engines of a run, with the episodes that run beside them."""

    def __init__(self, pool: RolloutPool, settings: TrainConfig) -> None:
        from agentrl.resolve.parts import flow_plan
        from agentrl.track.plan import num_recorded

        flow = flow_plan(settings)
        record = num_recorded(settings.record.record, settings.sampling.n_samples_per_prompt)
        self._pool, self._ids, self._ticket = pool, itertools.count(), partial(flow.group_requests(), record=record)
        self._keep, self._min_members = flow.group_filter(), flow.min_members
        self.version = 0

    async def play(self, task: Task) -> PlayedGroup:
        """Play the episodes of one task, ``n_samples_per_prompt`` of them, side by side on one engine.

        A failure of the environment or of a request becomes the status of an episode, never a reward.

        Raises:
            EngineDeadError: If no engine is left.
        """
        summary, episodes = await self._pool.run_group(self._ticket(group_id=next(self._ids), task=task, version=self.version))
        kept = summary.num_trainable >= self._min_members and self._keep(summary) is None
        return PlayedGroup(summary=summary, episodes=episodes, kept=kept)

    async def publish(self, weights: WeightUpdate) -> None:
        """Load weights into every engine; episodes under way go on with them. Afterwards `version` is theirs.

        Raises:
            WeightSyncError: If an engine did not take them.
        """
        await self._pool.publish(weights)
        self.version = weights.version


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRuntime:
    """The parts of a training run, started.

    Attributes:
        tasks: The tasks of the environment or of ``prompts``, in the order of the seed, epoch after epoch.
        engines: What plays episodes.
        learner: What trains: ``await train(step, groups)`` makes version ``step + 1`` of the weights of that many groups, oldest first, and
            reports ``metrics``; ``await export_weights(version)`` offers them to engines; ``await save_model(path)`` writes the policy.
    """

    tasks: Iterator[Task]
    engines: Engines
    learner: Learner


def settings(env: object = "", **settings: Any) -> TrainConfig:
    """Return the settings of a training run as ``agentrl train`` would have them, by section: ``settings.training.num_steps``.

    Args:
        env: As for `agentrl.train`.
        **settings: As for `agentrl.train`.

    Raises:
        ConfigError: If one of them is wrong.
    """
    from agentrl.api.settings import read_settings
    from agentrl.resolve.plan import RunPlan

    return RunPlan.of(read_settings(env, settings), named=False).settings


@asynccontextmanager
async def open_runtime(settings: TrainConfig) -> AsyncIterator[OpenRuntime]:
    """Load the model into engines and a learner, both at version 0 of the weights, and close everything at the end of the block.

    A process has one open runtime at a time. Nothing is written: no metrics, no checkpoints, no episodes.

    Raises:
        ConfigError: If the environment, its tasks or the model cannot be used.
        AgentRLError: If engines or learner do not start.
    """
    from agentrl.api.training import uninterrupted
    from agentrl.cluster.runtime import learner_beside, make_runtime, pool_of
    from agentrl.resolve.parts import check_model, cluster_plan, environment, training_tasks

    check_model(settings)
    tasks = training_tasks(settings, environment(settings))
    runtime = make_runtime(cluster_plan(settings), lambda stage: None)
    try:
        await runtime.start()
        pool = pool_of(runtime)
        learner = learner_beside(pool, runtime, settings.weights)
        yield OpenRuntime(tasks=iter(tasks), engines=Engines(pool, settings), learner=learner)
    finally:
        await uninterrupted(runtime.close())


def advantages(groups: Sequence[PlayedGroup], settings: TrainConfig) -> Tensor:
    """Return the advantage of every sampled token, in the order of groups, episodes and tokens. # [A] float32.

    The learner computes them by the same function in each step, on every rank. A critic's values, a KL penalty in the reward and a teacher
    come of models that the learner alone has, so they are not part of these.

    Raises:
        ConfigError: If the estimator needs a critic, or the tokens are in the processes of a cluster.
        BatchError: If nothing in the groups can be trained.
    """
    from agentrl.algo.compute import compute_advantages
    from agentrl.algo.estimators import find_estimator
    from agentrl.algo.plan import options_of
    from agentrl.learner.batch import advantage_inputs, collate

    if not all(isinstance(group.episodes, Group) for group in groups):
        remedy = "Use runtime='local', or read advantage/abs among the metrics that the learner reports."
        raise ConfigError("--runtime", settings.run.runtime, "leaves the tokens of episodes in the processes that sampled them", remedy)
    algo = settings.algo
    batch = collate([group.episodes for group in groups], mask_truncated=algo.mask_truncated, in_baseline=algo.truncated_in_baseline)
    estimator = find_estimator(algo.advantage_estimator)
    return compute_advantages(estimator, advantage_inputs(batch), options_of(algo, estimator)).advantages
