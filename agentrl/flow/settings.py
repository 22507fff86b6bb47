"""The sections of the configuration that the loops read, and the sizes that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.filters import GroupFilter, dynamic_filter, filter_truncated, find_filter, keep_all
from agentrl.config.algorithm import AlgoConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.schema import FlowConfig, RolloutConfig, RunConfig, TrackConfig, TrainConfig
from agentrl.config.sections import num_recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Sections of the configuration, whole; what is derived from them is a property."""

    run: RunConfig
    rollout: RolloutConfig
    reward: RewardConfig
    flow: FlowConfig
    algo: AlgoConfig
    track: TrackConfig

    @property
    def max_staleness(self) -> int:
        """Steps a trained token may be older than the weights it trains (S); 0 is synchronous training."""
        return self.flow.staleness

    @property
    def oversampled_groups(self) -> int:
        """Groups started per step beyond those it trains on; the last of them to finish are dropped."""
        return math.ceil(self.flow.oversample * self.rollout.groups_per_step)

    @property
    def groups_removed_per_step(self) -> int:
        """Groups that leave the queue in a step: those trained on and the oversampled ones."""
        return self.rollout.groups_per_step + self.oversampled_groups

    @property
    def num_slots(self) -> int:
        """Groups that may be under way at once: (S + 1) x G, oversampled groups included."""
        return (self.max_staleness + 1) * self.groups_removed_per_step

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
        return max(512, 16 * self.rollout.groups_per_step)

    @property
    def num_recorded(self) -> int:
        """Members per group to render as JSON records."""
        return num_recorded(self.track.record, self.rollout.n_samples_per_prompt)


def flow_settings(config: TrainConfig) -> FlowSettings:
    """Return the settings of the flow of a run."""
    return FlowSettings(
        run=config.run, rollout=config.rollout, reward=config.reward, flow=config.flow, algo=config.algo, track=config.track
    )


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
    return partial(dynamic_filter, score_range=config.flow.dynamic_filtering_range, reward_clip_range=config.algo.reward_clip_range)
