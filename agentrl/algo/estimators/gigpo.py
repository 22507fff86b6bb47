"""The reward of an episode in its group, and of each turn among the turns that the group's episodes took in the same state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, DiscountedOptions, standardised
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.flat import all_same, clipped_rewards, turn_returns
from agentrl.algo.statistics import reverse_discounted_cumsum
from agentrl.core.settings import Fraction, NonNegative
from agentrl.core.summaries import GroupSummary

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GigpoOptions(DiscountedOptions):
    """Options of `gigpo`."""

    gamma: Fraction = 0.95
    step_advantage_weight: NonNegative = 1.0
    """Weight of the comparison of turns in the same state beside that of episodes in ``gigpo``; 0 leaves ``group_norm``."""


def _equal_in_states(group: GroupSummary, options: GigpoOptions) -> bool:
    """Return True if the episodes earned the same in total, and from each state on that several turns began in."""
    rewards, by_state = clipped_rewards(group, options), defaultdict[int, list[float]](list)
    for member, reward in zip(group.trainable, rewards, strict=True):
        for state, ahead in zip(member.states, turn_returns(member, reward, options.gamma), strict=True):
            by_state[state].append(ahead)
    return all_same(rewards) and (not options.step_advantage_weight or all(map(all_same, by_state.values())))


@advantage_estimator(options=GigpoOptions, compares_group=True, flat=_equal_in_states, charges_kl=True, token_baseline=True)
def gigpo(inputs: AdvantageInputs, options: GigpoOptions) -> Tensor:
    """``A[i, k] = normalised(r[i]) + weight normalised(G[i, k])``: GiGPO (arXiv:2505.10978).

    The first is `group_norm`. ``G[i, k]`` is what the episode earned from turn k on, discounted per turn, normalised over all turns of the
    group's episodes that began in the same state, whichever turns of which episodes they are. A turn in a state that occurs once has 0
    there. Both divide by the deviation, or neither.
    """
    turns = inputs.turns(options)
    ahead = reverse_discounted_cumsum(turns.rewards, turns.episode, options.gamma)
    steps = standardised(ahead, *inputs.same_states(turns), divide=options.advantage_std_norm)
    episodes = inputs.group_normalised(inputs.clipped_rewards(options), options)
    found = episodes[turns.episode] + options.step_advantage_weight * steps
    spread = found.to(inputs.token_rewards.dtype)[turns.of_token]
    return spread if inputs.kl is None else spread - inputs.sum_ahead(inputs.kl)
