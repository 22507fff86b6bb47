"""The reward from each token on, with or without the mean of the group as a baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, DiscountedOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import equal_rewards

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(options=DiscountedOptions, whitens=True, charges_kl=True)
def reinforce(inputs: AdvantageInputs, options: DiscountedOptions) -> Tensor:
    """Discounted sum of the token rewards from each token on, whitened: REINFORCE++ (arXiv:2501.03262)."""
    return inputs.sum_ahead(inputs.clipped_token_rewards(options), options.gamma)


@advantage_estimator(options=DiscountedOptions, compares_group=True, flat=equal_rewards, whitens=True, charges_kl=True)
def reinforce_baseline(inputs: AdvantageInputs, options: DiscountedOptions) -> Tensor:
    """``r[i] - mean(r)`` of the group, earned at the episode's end, then as `reinforce` (arXiv:2501.03262, -baseline)."""
    rewards = inputs.clipped_rewards(options)
    return inputs.sum_ahead(inputs.at_last_token(rewards - inputs.group_mean(rewards)), options.gamma)
