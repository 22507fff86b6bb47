"""The reward of an episode against the mean of the others of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import equal_rewards

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(compares_group=True, flat=equal_rewards, charges_kl=True)
def rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """``r[i]`` minus the mean of the other members, ``(n r[i] - sum r) / (n - 1)`` (arXiv:2402.14740)."""
    rewards, size = inputs.clipped_rewards(options), inputs.group_size()
    # In a group of one the numerator is 0, and the bound only prevents 0 / 0.
    return inputs.over_tokens((size * rewards - inputs.group_sum(rewards)) / (size - 1.0).clamp(min=1.0))
