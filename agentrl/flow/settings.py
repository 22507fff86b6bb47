"""The sections of the configuration that the loops read, and the sizes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from agentrl.algo.estimators import estimator_facts, find_estimator
from agentrl.algo.filters import GroupFilter, dynamic_filter, filter_truncated, find_filter, keep_all
from agentrl.algo.plan import AlgoConfig, options_of
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.config.sections import changed, sections_of
from agentrl.core.types import GroupRequest

P = TypeVar("P", bound=PlaySettings)

EPISODES_PER_WORKER = 1000
"""Live episodes for which ``--rollout-workers-per-engine auto`` takes a worker: with steps of a second each, a worker spends about half
a core on them."""


class FlowSettings(TrainConfig):
    """Settings of a training run, and the sizes that follow from them."""

    @property
    def max_staleness(self) -> int:
        """Steps a trained token may be older than the weights it trains (S); 0 is synchronous training."""
        return self.flow.staleness

    @property
    def oversampled_groups(self) -> int:
        """Groups started per step beyond those it trains on; the last of them to finish are dropped."""
        return math.ceil(self.flow.oversample * self.flow.groups_per_step)

    @property
    def groups_removed_per_step(self) -> int:
        """Groups that leave the queue in a step: those trained on and the oversampled ones."""
        return self.flow.groups_per_step + self.oversampled_groups

    @property
    def num_slots(self) -> int:
        """Groups that may be under way at once: (S + 1) x G, oversampled groups included."""
        return (self.max_staleness + 1) * self.groups_removed_per_step

    @property
    def live_episodes(self) -> int:
        """Episodes that may be under way at once beside one engine, greedy ones left out."""
        limit = self.rollout.max_concurrent_episodes
        most = math.ceil(self.num_slots * self.sampling.n_samples_per_prompt / self.engine.num_engines)
        return min(most, limit) if limit else most

    @property
    def min_members(self) -> int:
        """Trainable members that a group needs; 2 for estimators that compare the members of a group."""
        return min_members(self.algo)

    @property
    def greedy_baseline(self) -> bool:
        """True if each group has a greedy episode beside its members."""
        return estimator_facts(self.algo.advantage_estimator).greedy_baseline

    @property
    def pass_window(self) -> int:
        """Groups over which ``--min-pass-rate`` is judged, all of which must have been seen."""
        return max(512, 16 * self.flow.groups_per_step)

    def group_requests(self) -> Callable[..., GroupRequest]:
        """Return a maker of tickets for training groups, told what differs: `group_id`, `task`, `version`, `record`, `reward_scales`.

        The facts of the estimator, which may be of a user's file, are read here, once.
        """
        samples = self.sampling.n_samples_per_prompt
        return partial(GroupRequest, n_samples_per_prompt=samples, greedy=self.greedy_baseline)


def flow_settings(config: TrainConfig) -> FlowSettings:
    """Return the settings of the flow of a run."""
    return FlowSettings(**{name: getattr(config, name) for name in sections_of(TrainConfig)})


def with_front_ends(config: P, cores: int) -> P:
    """Return the settings with a number in place of ``--rollout-workers-per-engine auto``.

    It is 1 where nothing is trained, and where engine and learner are in one process or take turns.

    Args:
        config: The settings of a command.
        cores: Those of the machine or cluster, which engines, learner ranks and reward models have one each of, too.
    """
    if config.rollout.rollout_workers_per_engine != "auto":
        return config
    workers = 1
    if isinstance(config, TrainConfig) and config.run.runtime != "local" and not config.weights.colocate:
        engines = config.engine.num_engines
        others = engines + config.learner.num_learners + len(config.reward.reward_model) * config.reward.reward_model_workers
        wanted = math.ceil(flow_settings(config).live_episodes / EPISODES_PER_WORKER)
        workers = max(1, min(wanted, (cores - others) // engines))
    return changed(config, rollout_workers_per_engine=workers)


def min_members(algo: AlgoConfig) -> int:
    """Return the trainable members that a group needs."""
    return 2 if estimator_facts(algo.advantage_estimator).compares_group else 1


def group_filter(config: TrainConfig) -> GroupFilter:
    """Return the filter that the configuration asks for.

    Raises:
        ConfigError: If the user's own cannot be used.
    """
    keep, algo = _chosen_filter(config), config.algo
    if not algo.mask_truncated:
        return keep
    return partial(filter_truncated, keep=keep, in_baseline=algo.truncated_in_baseline, least=min_members(algo))


def _chosen_filter(config: TrainConfig) -> GroupFilter:
    if config.flow.group_filter:
        return find_filter(config.flow.group_filter)
    if not config.flow.dynamic_filtering:
        return keep_all
    clip = options_of(config.algo, find_estimator(config.algo.advantage_estimator)).reward_clip_range
    return partial(dynamic_filter, score_range=config.flow.dynamic_filtering_range, reward_clip_range=clip)
