"""The reward of an episode against the mean of its group weighted by length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import equal_rewards
from agentrl.algo.statistics import segment_count

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(compares_group=True, flat=equal_rewards, charges_kl=True, token_baseline=True)
def opo(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """``r[i]`` minus the mean of the group weighted by length, the baseline of least variance: OPO (arXiv:2505.23585)."""
    rewards, length = inputs.clipped_rewards(options), segment_count(inputs.episode, len(inputs.rewards)).double()
    return inputs.over_tokens(rewards - inputs.group_sum(length * rewards) / inputs.group_sum(length).clamp(min=1.0))
