"""The reward of an episode against that of a greedy one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import all_same, clipped_rewards
from agentrl.core.errors import BatchError
from agentrl.core.summaries import GroupSummary

if TYPE_CHECKING:
    from torch import Tensor


def _as_the_greedy_one(group: GroupSummary, options: AdvantageOptions) -> bool:
    """Return True if all episodes earned what the greedy one did, once clipped."""
    if not group.greedy:
        return False
    low, high = options.bounds
    return all_same([*clipped_rewards(group, options), min(max(group.greedy[0].reward or 0.0, low), high)])


@advantage_estimator(flat=_as_the_greedy_one, charges_kl=True, greedy_baseline=True)
def remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """``r[i]`` minus the reward of an episode of the same task that took the most likely token each time: ReMax (arXiv:2310.10505).

    Raises:
        BatchError: If a task has no such episode.
    """
    if inputs.baseline is None:
        raise BatchError("--advantage-estimator remax needs the reward of a greedy episode of each task")
    return inputs.over_tokens(inputs.clipped_rewards(options) - inputs.baseline.double().clamp(*options.bounds))
