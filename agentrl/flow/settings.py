"""What the loops need to know, taken from the configuration once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from agentrl.algo.filters import GroupFilter, dynamic_filter, keep_all
from agentrl.config.schema import GROUP_ESTIMATORS, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Sizes, bounds and limits of one run.

    Attributes:
        num_steps: Optimizer steps to take.
        groups_per_step: Groups that make one step (G).
        num_samples: Episodes of a group.
        spare_groups: Groups started per step beyond those it trains on; the last of them to finish are dropped.
        max_staleness: Steps a trained token may be older than the weights it trains (S); 0 is synchronous training.
        min_members: Trainable members a group needs; 2 for estimators that compare the members of a group.
        max_attempts: Attempts at a group before it is dropped.
        max_failure_rate: Share of the last `failure_window` finished attempts that may fail.
        failure_window: Finished attempts over which failures are counted.
        min_failure_window: Finished attempts before the failure rate is looked at.
        min_pass_rate: The run stops if a smaller share of the last `pass_window` groups passes the filter.
        pass_window: Groups over which the pass rate is judged, all of which must have been seen.
        record: Members per group to render as JSON records.
        stall_timeout_s: Longest time in which no group finishes and no step ends.
    """

    num_steps: int
    groups_per_step: int
    num_samples: int
    spare_groups: int = 0
    max_staleness: int = 0
    min_members: int = 1
    max_attempts: int = 2
    max_failure_rate: float = 0.5
    failure_window: int = 64
    min_failure_window: int = 8
    min_pass_rate: float = 0.01
    pass_window: int = 512
    record: int = 0
    stall_timeout_s: float = 600.0

    @property
    def groups_removed_per_step(self) -> int:
        """Groups by which a step moves the line on: those trained on and the spare ones."""
        return self.groups_per_step + self.spare_groups

    @property
    def num_slots(self) -> int:
        """Groups that may be under way at once: (S + 1) x G, spare groups included."""
        return (self.max_staleness + 1) * self.groups_removed_per_step


def flow_settings(config: TrainConfig) -> FlowSettings:
    """Build the settings of the flow from the whole configuration."""
    rollout, flow = config.rollout, config.flow
    return FlowSettings(
        num_steps=config.run.num_steps,
        groups_per_step=rollout.groups_per_step,
        num_samples=rollout.n_samples_per_prompt,
        spare_groups=math.ceil(flow.oversample * rollout.groups_per_step),
        max_staleness=config.staleness,
        min_members=2 if config.algo.advantage_estimator in GROUP_ESTIMATORS else 1,
        max_attempts=flow.max_attempts,
        max_failure_rate=flow.max_failure_rate,
        min_pass_rate=flow.min_pass_rate,
        pass_window=max(512, 16 * rollout.groups_per_step),
        record={"none": 0, "sample": 1, "all": rollout.n_samples_per_prompt}[config.track.record],
        stall_timeout_s=config.run.stall_timeout_s,
    )


def group_filter(config: TrainConfig) -> GroupFilter:
    """Return the filter that the configuration asks for."""
    if not config.flow.dynamic_filtering:
        return keep_all
    return partial(dynamic_filter, score_range=config.flow.dynamic_filtering_range)
