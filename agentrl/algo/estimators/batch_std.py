"""The reward of an episode in its group, in units of the batch's standard deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import equal_rewards
from agentrl.algo.statistics import SAME

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(compares_group=True, flat=equal_rewards, charges_kl=True)
def batch_std(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """``r[i] - mean(r)`` of the group, divided by the unbiased standard deviation of the rewards of the batch (arXiv:2508.08221)."""
    rewards = inputs.clipped_rewards(options)
    centred = rewards - inputs.group_mean(rewards)
    if options.advantage_std_norm and len(rewards) > 1:
        deviation = rewards.std()
        centred = (centred / (deviation + 1e-9)).where(deviation > SAME * rewards.abs().mean(), 0.0)
    return inputs.over_tokens(centred)
