"""An advantage estimator, a policy loss, an off-policy correction and a group filter of one's own; copy the file, and change it.

    agentrl train --agent envs/calculator.py \
        --advantage-estimator examples/own_algorithm.py:group_advantages \
        --policy-loss examples/own_algorithm.py:clipped_loss \
        --off-policy examples/own_algorithm.py:agreeing_tokens \
        --group-filter examples/own_algorithm.py:mixed_results

As they stand, they compute what `group_norm`, `ppo`, `icepop` and `--flat-groups resample` do, so a run gives the same weights with either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import agentrl

if TYPE_CHECKING:
    from torch import Tensor


@agentrl.advantage_estimator(compares_group=True, charges_kl=True)
def group_advantages(inputs: agentrl.AdvantageInputs, options: agentrl.AdvantageOptions) -> Tensor:
    """Compare each episode with its group, in units of the group's standard deviation."""
    rewards = inputs.clipped_rewards(options)  # one per episode
    advantages = (rewards - inputs.group_mean(rewards)) / (inputs.group_std(rewards) + 1e-9)
    return inputs.over_tokens(advantages)  # one per action token, minus the KL penalty


@agentrl.policy_loss
def clipped_loss(inputs: agentrl.LossInputs, options: agentrl.LossOptions) -> agentrl.TokenLosses:
    """PPO's loss: no token gains from moving further than the clip range from the policy that the batch was taken with."""
    low, high = 1 - options.eps_clip_low, 1 + options.eps_clip_high
    ratio = inputs.ratio()
    free, bounded = ratio * inputs.advantages, ratio.clamp(low, high) * inputs.advantages
    return agentrl.TokenLosses(
        per_token=-free.minimum(bounded),
        clipped=bounded < free,  # reported as policy/clip_fraction
        metrics={"distance": (ratio - 1).abs()},  # reported as policy/distance
    )


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Options of the correction; each has a default."""

    lowest: float = 0.5
    """Smallest ratio of a token that is trained."""
    highest: float = 5.0
    """Largest ratio of a token that is trained."""


@agentrl.off_policy_correction(options=Agreement)
def agreeing_tokens(inputs: agentrl.CorrectionInputs, options: Agreement) -> agentrl.TokenWeights:
    """Weigh each token by its importance ratio, and leave out those whose ratio is far from 1."""
    ratio = inputs.ratio()
    return agentrl.TokenWeights(weights=ratio, keep=(ratio >= options.lowest) & (ratio <= options.highest))


@agentrl.group_filter(compares_group=True)
def mixed_results(group: agentrl.GroupSummary) -> str | None:
    """Train only on groups in which some episodes went better than others."""
    if len({member.reward for member in group.trainable}) > 1:
        return None
    scores = [member.score for member in group.trainable if member.score is not None]
    if scores and sum(scores) == 0:
        return "too_hard"
    if scores and sum(scores) == len(scores):
        return "too_easy"
    return "zero_variance"
