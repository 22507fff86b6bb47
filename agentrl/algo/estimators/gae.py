"""Advantages from the values of a critic, by token or by turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algo.advantages import AdvantageInputs, Advantages, DiscountedOptions
from agentrl.algo.facts import advantage_estimator
from agentrl.algo.statistics import next_in_segment, reverse_discounted_cumsum
from agentrl.core.errors import ConfigError
from agentrl.core.settings import Fraction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GaeOptions(DiscountedOptions):
    """Options of `gae` and `turn_gae`."""

    gae_lambda: Fraction = 1.0
    """Lambda of ``gae``: 1 has no bias from the critic, lower has less variance."""


@advantage_estimator(options=GaeOptions, needs_critic=True, whitens=True, charges_kl=True)
def gae(inputs: AdvantageInputs, options: GaeOptions) -> Advantages:
    """Generalised advantage estimation over the action tokens of an episode, whitened (arXiv:1506.02438).

    ``d[t] = r[t] + gamma V[t+1] - V[t]``, ``A[t] = d[t] + gamma lambda A[t+1]``, ``returns = A + V`` before whitening.
    """
    if inputs.values is None:
        raise ConfigError("--advantage-estimator", "gae", "needs the values of a critic", "Train with a critic or choose another estimator")
    deltas = inputs.clipped_token_rewards(options) + options.gamma * inputs.next_token(inputs.values) - inputs.values
    advantages = inputs.sum_ahead(deltas, options.gamma * options.gae_lambda)
    return Advantages(advantages=advantages, returns=advantages + inputs.values)


@advantage_estimator(options=GaeOptions, needs_critic=True, whitens=True, charges_kl=True)
def turn_gae(inputs: AdvantageInputs, options: GaeOptions) -> Advantages:
    """`gae` with a turn as one action: the value at its first token, its rewards minus its KL, one advantage for all tokens; whitened.

    Turn-level GAE (Turn-PPO, arXiv:2512.17008). The discount is per turn. All tokens of a turn share the target of the critic.
    """
    if inputs.values is None:
        raise ConfigError("--advantage-estimator", "turn_gae", "needs the values of a critic", "Train with a critic")
    turns = inputs.turns(options)
    values, rewards = inputs.values[turns.start].double(), turns.rewards - _paid_by_turns(inputs, turns.of_token, len(turns.start))
    deltas = rewards + options.gamma * next_in_segment(values, turns.episode) - values
    advantages = reverse_discounted_cumsum(deltas, turns.episode, options.gamma * options.gae_lambda)
    dtype = inputs.token_rewards.dtype
    return Advantages(advantages=advantages.to(dtype)[turns.of_token], returns=(advantages + values).to(dtype)[turns.of_token])


def _paid_by_turns(inputs: AdvantageInputs, of_token: Tensor, turns: int) -> Tensor:
    """KL penalty of each turn. # [T]."""
    paid = inputs.token_rewards.new_zeros(turns).double()
    return paid if inputs.kl is None else paid.index_add(0, of_token, inputs.kl.double())
