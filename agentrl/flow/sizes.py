"""The plan of the loops: sections of settings, and the sizes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.filters import GroupFilter, filter_truncated, find_filter, keep_all, reject_flat
from agentrl.algo.plan import AlgoConfig, flatness
from agentrl.core.types import GroupRequest
from agentrl.flow.plan import FlowConfig, TrainingConfig

EPISODES_PER_WORKER = 1000
"""Live episodes for which ``--rollout-workers-per-engine auto`` takes a worker: with steps of a second each, a worker spends about half
a core on them."""


@dataclass(frozen=True, kw_only=True)
class FlowPlan:
    """The plan of the loops of a run: sections as they are, and the sizes that follow from them.

    Attributes:
        training: Section with the length of the run.
        flow: Section with groups per step, staleness and failures.
        algo: Section with the algorithm.
        n_samples_per_prompt: Episodes of a group.
        num_engines: Engines that generate for training.
        max_concurrent_episodes: Episodes that may be under way at once beside one engine; 0: no limit of its own.
        normalizes_rewards: True if rewards are divided by the spread of those seen so far.
        stall_timeout_s: Seconds without progress after which the run ends with a diagnosis.
        min_pass_rate: Share of the last groups that has to pass the filter; with a smaller one the run ends.
    """

    training: TrainingConfig = field(default_factory=TrainingConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    n_samples_per_prompt: int = 1
    num_engines: int = 1
    max_concurrent_episodes: int = 0
    normalizes_rewards: bool = False
    stall_timeout_s: float = 600.0
    min_pass_rate: float = 0.01

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
        limit = self.max_concurrent_episodes
        most = math.ceil(self.num_slots * self.n_samples_per_prompt / self.num_engines)
        return min(most, limit) if limit else most

    @property
    def most_workers(self) -> int:
        """Rollout workers beside one engine that have enough to do."""
        return math.ceil(self.live_episodes / EPISODES_PER_WORKER)

    @property
    def min_members(self) -> int:
        """Trainable members that a group needs; 2 for estimators that compare the members of a group."""
        return 2 if estimator_facts(self.algo.advantage_estimator).compares_group else 1

    @property
    def greedy_baseline(self) -> bool:
        """True if each group has a greedy episode beside its members."""
        return estimator_facts(self.algo.advantage_estimator).greedy_baseline

    @property
    def pass_window(self) -> int:
        """Groups over which `min_pass_rate` is judged, all of which must have been seen."""
        return max(512, 16 * self.flow.groups_per_step)

    def group_requests(self) -> Callable[..., GroupRequest]:
        """Return a maker of tickets for training groups, told what differs: `group_id`, `task`, `version`, `record`, `reward_scales`.

        The facts of the estimator, which may be of a user's file, are read here, once.
        """
        return partial(GroupRequest, n_samples_per_prompt=self.n_samples_per_prompt, greedy=self.greedy_baseline)

    def group_filter(self) -> GroupFilter:
        """Return the filter that the settings ask for.

        Raises:
            ConfigError: If the user's own cannot be used.
        """
        keep, algo = self._chosen_filter(), self.algo
        if not algo.mask_truncated:
            return keep
        return partial(filter_truncated, keep=keep, in_baseline=algo.truncated_in_baseline, least=self.min_members)

    def _chosen_filter(self) -> GroupFilter:
        if self.flow.group_filter:
            return find_filter(self.flow.group_filter)
        if self.flow.flat_groups == "train":
            return keep_all
        return partial(reject_flat, flat=flatness(self.algo), score_range=self.flow.score_range)
