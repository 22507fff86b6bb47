"""The reward of an episode in its group, in units of the group's standard deviation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, AdvantageOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import equal_rewards

if TYPE_CHECKING:
    from torch import Tensor


@advantage_estimator(compares_group=True, flat=equal_rewards, charges_kl=True)
def group_norm(inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """``(r[i] - mean(r)) / (std(r) + 1e-9)`` with the group's unbiased standard deviation: GRPO (arXiv:2402.03300); see `standardised`."""
    return inputs.over_tokens(inputs.group_normalised(inputs.clipped_rewards(options), options))


grpo = group_norm
"""Another name of it."""
