"""The reward of an episode against the mean of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import equal_rewards

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(compares_group=True, flat=equal_rewards, charges_kl=True, length_neutral=True)
def dr_grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """``r[i] - mean(r)`` of the group; meant for the loss aggregation ``constant``: Dr. GRPO (arXiv:2503.20783)."""
    rewards = inputs.clipped_rewards(options)
    return inputs.over_tokens(rewards - inputs.group_mean(rewards))
