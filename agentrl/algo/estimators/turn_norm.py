"""The reward from each turn on, compared at the same turn of the group's episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, DiscountedOptions, standardised
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import equal_turns
from agentrl.algo.statistics import reverse_discounted_cumsum
from agentrl.core.summaries import GroupSummary

if TYPE_CHECKING:
    from torch import Tensor


def _equal_turns(group: GroupSummary, options: DiscountedOptions) -> bool:
    """Return True if the episodes earned the same from each turn on."""
    return equal_turns(group, options, options.gamma)


@advantage_estimator(options=DiscountedOptions, compares_group=True, flat=_equal_turns, charges_kl=True, token_baseline=True)
def turn_norm(inputs: AdvantageInputs, options: DiscountedOptions) -> Tensor:
    """Reward of an episode from a turn on, normalised over the same turn of the group's episodes, for the tokens of that turn.

    Credit per turn without a critic, as in arXiv:2505.11821; the discount is per turn. `group_norm` where episodes have one turn. A turn
    that no other episode of the group reached has advantage 0.
    """
    turns = inputs.turns(options)
    ahead = reverse_discounted_cumsum(turns.rewards, turns.episode, options.gamma)
    found = standardised(ahead, *inputs.same_turns(turns), divide=options.advantage_std_norm)
    spread = found.to(inputs.token_rewards.dtype)[turns.of_token]
    return spread if inputs.kl is None else spread - inputs.sum_ahead(inputs.kl)
